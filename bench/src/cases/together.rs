//! Measures the cost of the parameter server: how much two trainers and a server get done on this machine, over twice
//! what one process does that trains the same net alone, with its own optimizer. One thread each. Two such processes at
//! once show what this machine has for two: they share caches and memory bandwidth, but have no server.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::job;
use crate::report::Case;

/// How long, and with what.
#[derive(Debug, Args)]
pub struct TogetherArgs {
    /// Steps of each process in each run [default: 300 of mnist, 100 of lm]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

/// A workload as it is measured.
pub struct Workload {
    pub name: &'static str,
    pub train: &'static str,
    /// `spec.training`.
    pub training: fn() -> Value,
    steps: u32,
    pub unit: &'static str,
    /// Units in one step of one trainer.
    pub per_step: f64,
}

/// The convolutional net.
pub const MNIST: Workload = Workload {
    name: "mnist",
    train: "train mnist",
    training: || json!({"optimizer": {"learningRate": 0.01, "momentum": 0.9}}),
    steps: 300,
    unit: "steps/s",
    per_step: 1.0,
};

/// The language model, by 32 windows of 20 tokens a step.
pub const LM: Workload = Workload {
    name: "lm",
    train: "train lm --window 20 --batch-size 32 --epochs 1000",
    training: || json!({"optimizer": {"type": "Adam", "learningRate": 0.001}}),
    steps: 100,
    unit: "tokens/s",
    per_step: 640.0,
};

impl TogetherArgs {
    pub fn measure(&self, workload: &Workload, runs: u32) -> anyhow::Result<Vec<Case>> {
        let &Workload { name, train, training, steps, unit, per_step } = workload;
        let worker = job::worker(self.worker.as_deref())?;
        let train = format!("{train} --max-steps {}", self.steps.unwrap_or(steps));
        let pair = job::Pair::new(&format!("bench-{name}"), training(), 2, &train)?;
        let [together, alone, at_once] = pair.measure_with_loops(&worker, runs)?;
        let units = |rates: &[f64], times: f64| rates.iter().map(|rate| times * per_step * rate).collect::<Vec<_>>();
        let case = |case, rates: &[f64]| Case::new(name, case, unit, &units(rates, 1.0), &units(&alone, 2.0));
        Ok(vec![case("2-trainers-1-server", &together), case("2-loops-at-once", &at_once)])
    }
}
