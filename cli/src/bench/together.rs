//! What the parameter server costs: how much two trainers and a server get done on this machine, over twice what one
//! process does that trains the same net alone, with its own optimizer. One thread each.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::{Case, job, say};

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

/// A workload, its optimizer as a job has it and as flags.
pub struct Workload {
    name: &'static str,
    train: &'static str,
    optimizer: fn() -> Value,
    flags: &'static str,
    steps: u32,
    unit: &'static str,
    /// Units in one step of one trainer.
    per_step: f64,
}

/// The convolutional net.
pub const MNIST: Workload = Workload {
    name: "mnist",
    train: "train mnist",
    optimizer: || json!({"learningRate": 0.01, "momentum": 0.9}),
    flags: "--learning-rate 0.01 --momentum 0.9",
    steps: 300,
    unit: "steps/s",
    per_step: 1.0,
};

/// The language model, by 32 windows of 20 tokens a step.
pub const LM: Workload = Workload {
    name: "lm",
    train: "train lm --window 20 --batch-size 32 --epochs 1000",
    optimizer: || json!({"type": "Adam", "learningRate": 0.001}),
    flags: "--optimizer adam --learning-rate 0.001",
    steps: 100,
    unit: "tokens/s",
    per_step: 640.0,
};

impl TogetherArgs {
    pub fn measure(&self, workload: &Workload, runs: u32) -> anyhow::Result<Vec<Case>> {
        let &Workload { name, train, optimizer, flags, steps, unit, per_step } = workload;
        let worker = job::worker(self.worker.as_deref())?;
        let train = format!("{train} --max-steps {}", self.steps.unwrap_or(steps));
        let args: Vec<&str> = train.split(' ').collect();
        let job = job::job(&format!("bench-{name}"), json!({"optimizer": optimizer()}), 2, &args)?;
        let alone_args: Vec<&str> = args.iter().copied().chain(["--local"]).chain(flags.split(' ')).collect();
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("{name}: run {run} of {runs}"));
            alone.push(2.0 * per_step * job::alone(&worker, &alone_args)?);
            let rate = job::run(&job, &worker)?.steps_per_second.context("the trainers left no result")?;
            together.push(per_step * rate);
        }
        Ok(vec![Case::new(name, "2-trainers-1-server", unit, &together, &alone)])
    }
}
