//! The examples as users run them: `psjobs run` with the real worker on real data. `make test` names the
//! worker; without one, as where there is no libtorch, there is nothing to run.

mod process;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use process::Running;
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(300);

/// The summary of `psjobs run examples/NAME`; `None` where no worker is named.
fn run(name: &str) -> Option<Value> {
    if std::env::var_os("PSJOBS_WORKER").is_none() {
        eprintln!("examples/{name} was not run: PSJOBS_WORKER names no psjobs-worker; `make test` does");
        return None;
    }
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name);
    let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs"));
    command.args(["run", "--json", "--no-progress"]).arg(example);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = Running::start(&mut command).output(DEADLINE);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    Some(serde_json::from_slice(&output.stdout).expect("one JSON object"))
}

#[test]
fn a_perceptron_learns_mnist() {
    let Some(summary) = run("mlp.yaml") else { return };
    assert_eq!(summary["state"], "Succeeded");
    assert_eq!((&summary["servers"], &summary["trainers"]), (&1.into(), &2.into()));
    assert!(summary["accuracy"].as_f64() >= Some(0.97), "{summary}");
    assert!(summary["steps_per_second"].as_f64() > Some(0.0), "{summary}");
}
