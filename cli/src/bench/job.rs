//! What benchmarks run: jobs on this machine, and one process that trains alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use psjobs_api::ReplicaResult;
use psjobs_api::crd::ParameterServerJob;
use psjobs_api::env::PSJOB_RESULT_FILE;
use serde_json::{Value, json};

use crate::BadInput;
use crate::run::{self, Options, Progress, State, Summary, Wish, machine};

const THREADS: &str = "OMP_NUM_THREADS";

/// The worker to measure.
pub fn worker(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(machine::find_worker(named)?.ok_or_else(|| {
        BadInput::new(
            "psjobs-worker is neither beside psjobs nor on PATH; build it with `make build`, or name it with --worker",
        )
    })?)
}

/// A job of one server and `trainers` trainers with `args`; one thread in each process.
pub fn job(name: &str, training: Value, trainers: u32, args: &[&str]) -> anyhow::Result<ParameterServerJob> {
    let template = |container: &str, args: &[&str]| {
        let env = json!([{"name": THREADS, "value": "1"}]);
        json!({"spec": {"containers": [{"name": container, "image": "psjobs-worker", "args": args, "env": env}]}})
    };
    let manifest = json!({
        "apiVersion": "psjobs.dev/v1alpha1",
        "kind": "ParameterServerJob",
        "metadata": {"name": name},
        "spec": {
            "training": training,
            "ps": {"template": template("ps", &["serve"])},
            "trainer": {"replicas": trainers, "template": template("trainer", args)},
        },
    });
    serde_json::from_value(manifest).context("the benchmark's own manifest")
}

/// Runs a job to its end.
pub fn run(job: &ParameterServerJob, worker: &Path) -> anyhow::Result<Summary> {
    let wish = Wish { progress: Progress::None, output: false };
    let options = Options {
        worker: Some(worker.to_owned()),
        data: None,
        log_dir: None,
        checkpoint_dir: run::CHECKPOINTS.into(),
        wish,
    };
    let (summary, signal) = run::execute(job, &options, &mut |_| {})?;
    ensure!(signal.is_none() && summary.state == State::Succeeded, "the job did not succeed; nothing was measured");
    Ok(summary)
}

/// Steps/s of MNIST's convolutional net in one process and one thread, with its own optimizer.
pub fn mnist_alone(worker: &Path, steps: u32) -> anyhow::Result<f64> {
    alone(worker, &["train", "mnist", "--local", "--threads", "1", "--max-steps", &steps.to_string()])
}

/// Steps/s of one process that trains alone, as `args` say.
pub fn alone(worker: &Path, args: &[&str]) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let file = folder.path().join("result.json");
    let output = Command::new(worker)
        .args(args)
        .env(THREADS, "1")
        .env(PSJOB_RESULT_FILE, &file)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", worker.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the local loop failed: {}", log.lines().last().unwrap_or_default());
    let result = fs::read_to_string(&file).ok().as_deref().and_then(ReplicaResult::parse);
    let result = result.with_context(|| format!("the local loop left no result in {}", file.display()))?;
    Ok(result.steps as f64 / result.seconds)
}
