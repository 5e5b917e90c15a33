//! Measures the cost of a network on a server: steps a second of MNIST with the network behind remote calls, by
//! one and by two trainers, over one local loop and twice one. One thread for each call, as for each loop. Two local loops
//! at once show what this machine has for two.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use crate::job;
use crate::report::{Case, say};

/// Steps/s of trainers whose network lives on a server, over as many times one local loop's; and of two loops at once
#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// Steps of each trainer in each run; the first 200 are slower than those after them
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

const CASES: [(&str, u32); 2] = [("1-trainer", 1), ("2-trainers", 2)];
const LOOPS: u32 = 2;

impl RemoteArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = job::worker(self.worker.as_deref())?;
        let steps = self.steps.to_string();
        let args = ["train", "mnist-remote", "--num-gpus", "0", "--max-steps", &steps];
        let (mut remote, mut alone, mut at_once) = ([const { Vec::new() }; CASES.len()], Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("remote: run {run} of {runs}"));
            alone.push(job::mnist_loops(&worker, self.steps, 1)?);
            for ((_, trainers), rates) in CASES.iter().zip(&mut remote) {
                let training = json!({"optimizer": {"learningRate": 0.03}});
                let job = job::job("bench-remote", training, *trainers, &args)?;
                let summary = job::run(&job, &worker)?;
                rates.push(summary.steps_per_second.context("the trainers left no result")?);
            }
            at_once.push(job::mnist_loops(&worker, self.steps, LOOPS)?);
        }
        let case = |((name, times), rates): (&(&'static str, u32), &Vec<f64>)| {
            let limits: Vec<f64> = alone.iter().map(|rate| rate * f64::from(*times)).collect();
            Case::new("remote", name, "steps/s", rates, &limits)
        };
        let loops = (&("2-loops-at-once", LOOPS), &at_once);
        Ok(CASES.iter().zip(&remote).chain([loops]).map(case).collect())
    }
}
