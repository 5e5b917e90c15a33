//! What the parameter server costs: steps a second of two trainers and a server on this machine, over
//! twice those of one process that trains the same net alone, with its own optimizer. One thread each.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use super::{Case, job, say};

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

impl MnistArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = job::worker(self.worker.as_deref())?;
        let training = json!({"optimizer": {"learningRate": 0.01, "momentum": 0.9}});
        let steps = self.steps.to_string();
        let job = job::job("bench-mnist", training, 2, &["train", "mnist", "--max-steps", &steps])?;
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("mnist: run {run} of {runs}"));
            alone.push(2.0 * job::mnist_alone(&worker, self.steps)?);
            together.push(job::run(&job, &worker)?.steps_per_second.context("the trainers left no result")?);
        }
        Ok(vec![Case::new("mnist", "2-trainers-1-server", "steps/s", &together, &alone)])
    }
}
