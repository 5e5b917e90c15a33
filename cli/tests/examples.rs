//! The examples as users run them: `psjobs run` with the real worker on real data. `make test` names the
//! worker; without one, as where there is no libtorch, there is nothing to run.

mod process;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use process::{Running, example};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(300);

/// The worker that `make test` names.
fn worker() -> Option<PathBuf> {
    let worker = std::env::var_os("PSJOBS_WORKER").map(PathBuf::from);
    if worker.is_none() {
        eprintln!("nothing was run: PSJOBS_WORKER names no psjobs-worker; `make test` does");
    }
    worker
}

/// The accuracy that `psjobs run` reaches with examples/NAME, changed.
fn accuracy(name: &str, changes: &[(&str, &str)]) -> Option<f64> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join(name);
    fs::write(&file, example(name, changes)).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs"));
    command.args(["run", "--json", "--no-progress"]).arg(file);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = Running::start(&mut command).output(DEADLINE);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(summary["state"], "Succeeded");
    assert_eq!((&summary["servers"], &summary["trainers"]), (&1.into(), &2.into()));
    assert!(summary["steps_per_second"].as_f64() > Some(0.0), "{summary}");
    summary["accuracy"].as_f64()
}

#[test]
fn a_perceptron_learns_mnist() {
    let Some(_) = worker() else { return };
    let accuracy = accuracy("mlp.yaml", &[]);
    assert!(accuracy >= Some(0.97), "{accuracy:?}");
}

/// Runs the crate that `make custom` builds and trains for longer; the workspace has built it beside the worker.
#[test]
fn a_users_own_workload_learns_clothes() {
    let Some(worker) = worker() else { return };
    let clothes = worker.with_file_name("clothes");
    assert!(clothes.exists(), "{} is not built; `make test` does", clothes.display());
    let command = format!("command: [{}]", clothes.display());
    let changes = [("command: [clothes]", command.as_str()), (r#"--epochs, "2""#, r#"--max-steps, "400""#)];
    let accuracy = accuracy("custom.yaml", &changes);
    assert!(accuracy >= Some(0.78), "{accuracy:?}");
}
