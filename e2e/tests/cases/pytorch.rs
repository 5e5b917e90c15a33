//! A PyTorch script that the package's `submit` sends to the cluster, as docs/python.md types it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use psjobs_e2e::cluster::ROOT;
use psjobs_e2e::command::run;
use psjobs_e2e::namespace::TestNamespace;

/// The page's command, with the Python of `make test-python` and a configuration of kubectl that names this namespace.
pub async fn submitted_script_trains(namespace: &TestNamespace) -> Result<()> {
    let python = run("scripts/python.sh", &[]).await?;
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into());
    let package = PathBuf::from(ROOT).join(target).join("python");
    ensure!(package.join("psjobs").exists(), "{} is not there; run make image-torch", package.display());
    let folder = tempfile::tempdir().context("cannot make a folder")?;
    let file = folder.path().join("kubeconfig");
    let configuration = namespace.cluster.kubectl(&["config", "view", "--raw", "--minify", "--flatten"]).await?;
    std::fs::write(&file, configuration)?;
    let file = file.display().to_string();
    run("kubectl", &["--kubeconfig", &file, "config", "set-context", "--current", "--namespace", &namespace.name])
        .await?;
    let command = [
        &format!("KUBECONFIG={file}"),
        &format!("PYTHONPATH={}", package.display()),
        python.trim(),
        "-P",
        "examples/pytorch/submit_circle.py",
    ];
    let said = run("env", &command).await?;
    namespace.print(format_args!("{}", said.trim()));
    ensure!(said.contains("trainer 1 of 2: accuracy 0.9"), "the trainer's log is missing in:\n{said}");
    ensure!(said.contains("the centre is inside: True"), "the model has learnt nothing:\n{said}");
    let left = namespace.kubectl(&["get", "configmaps", "-o", "name"]).await?;
    let script = left.lines().find(|name| name.contains("circle-") && name.ends_with("-script"));
    let script = script.with_context(|| format!("no ConfigMap with the script in:\n{left}"))?;
    namespace.kubectl(&["delete", "psjob", "--all"]).await?;
    // Owned by the job, so the garbage collector deletes it.
    namespace.kubectl(&["wait", "--for=delete", script, "--timeout=60s"]).await?;
    Ok(())
}
