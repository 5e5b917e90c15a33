//! What the parameter server costs: steps a second of two trainers and a server on this machine, over
//! twice those of one process that trains the same net alone, with its own optimizer. One thread each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use clap::Args;
use psjobs_api::ReplicaResult;
use psjobs_api::crd::ParameterServerJob;
use psjobs_api::env::PSJOB_RESULT_FILE;

use super::{Case, say};
use crate::BadInput;
use crate::run::{self, Options, Progress, State, Wish, machine};

/// Steps/s of two trainers and one server, over twice one local loop's
#[derive(Debug, Args)]
pub struct MnistArgs {
    /// Steps of each process in each run
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

const THREADS: &str = "OMP_NUM_THREADS";

impl MnistArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = machine::find_worker(self.worker.as_deref())?.ok_or_else(|| {
            BadInput::new("psjobs-worker is neither beside psjobs nor on PATH; build it with `make build`, or name it with --worker")
        })?;
        let job = self.job()?;
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("mnist: run {run} of {runs}"));
            alone.push(2.0 * self.local(&worker)?);
            together.push(self.distributed(&job, &worker)?);
        }
        Ok(vec![Case::new("mnist", "2-trainers-1-server", "steps/s", &together, &alone)])
    }

    fn job(&self) -> anyhow::Result<ParameterServerJob> {
        let manifest = serde_json::json!({
            "apiVersion": "psjobs.dev/v1alpha1",
            "kind": "ParameterServerJob",
            "metadata": {"name": "bench-mnist"},
            "spec": {
                "training": {"optimizer": {"learningRate": 0.01, "momentum": 0.9}},
                "trainer": {"replicas": 2, "template": {"spec": {"containers": [{
                    "name": "trainer",
                    "args": ["train", "mnist", "--max-steps", self.steps.to_string()],
                    "env": [{"name": THREADS, "value": "1"}],
                }]}}},
            },
        });
        serde_json::from_value(manifest).context("the benchmark's own manifest")
    }

    fn distributed(&self, job: &ParameterServerJob, worker: &Path) -> anyhow::Result<f64> {
        let wish = Wish { progress: Progress::None, output: false };
        let options = Options { worker: Some(worker.to_owned()), data: None, log_dir: None, wish };
        let (summary, signal) = run::execute(job, &options)?;
        ensure!(signal.is_none() && summary.state == State::Succeeded, "the job did not succeed; nothing was measured");
        summary.steps_per_second.context("the trainers left no result")
    }

    fn local(&self, worker: &Path) -> anyhow::Result<f64> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let file = folder.path().join("result.json");
        let output = Command::new(worker)
            .args(["train", "mnist", "--local", "--threads", "1", "--max-steps", &self.steps.to_string()])
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
}
