//! What servers cost a trainer on a GPU: steps a second of one trainer on CUDA with a server on the CPU, over those of
//! the same loop without a server on the same GPU.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::{Case, job, say};
use crate::run::machine;

/// Steps/s of a trainer on a GPU with its server on the CPU, over the same loop alone; nothing without a GPU
#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Steps in each run
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Images in one step
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    images: u32,
    /// Windows of text in one step
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    windows: u32,
    /// Units of the language model's LSTM; half as many numbers stand for a word
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    hidden: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

/// A workload, its optimizer as a job has it and as flags.
struct Measured {
    name: &'static str,
    train: String,
    optimizer: Value,
    flags: &'static str,
}

impl GpuArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        if machine::gpus().is_empty() {
            eprintln!("psjobs: this machine has no CUDA device, so nothing was measured");
            return Ok(Vec::new());
        }
        let worker = job::worker(self.worker.as_deref())?;
        let mut cases = Vec::new();
        for Measured { name, train, optimizer, flags } in self.workloads() {
            let args: Vec<&str> = train.split_whitespace().collect();
            let mut job = job::job("bench-gpu", json!({"optimizer": optimizer}), 1, &args)?;
            job.spec.trainer.gpus = 1;
            let alone_args: Vec<&str> = args.iter().copied().chain(flags.split_whitespace()).collect();
            let (mut together, mut alone) = (Vec::new(), Vec::new());
            for run in 1..=runs {
                say(&format!("gpu: {name}, run {run} of {runs}"));
                alone.push(job::alone(&worker, &alone_args)?);
                together.push(job::run(&job, &worker)?.steps_per_second.context("the trainer left no result")?);
            }
            cases.push(Case::new("gpu", name, "steps/s", &together, &alone));
        }
        Ok(cases)
    }

    fn workloads(&self) -> [Measured; 2] {
        let Self { steps, images, windows, hidden, .. } = self;
        let extent = |batch: &u32| format!("--device cuda --max-steps {steps} --epochs 1000 --batch-size {batch}");
        [
            Measured {
                name: "mnist",
                train: format!("train mnist {}", extent(images)),
                optimizer: json!({"learningRate": 0.01, "momentum": 0.9}),
                flags: "--local --learning-rate 0.01 --momentum 0.9",
            },
            Measured {
                name: "lm",
                train: format!("train lm --embedding {} --hidden {hidden} {}", hidden / 2, extent(windows)),
                optimizer: json!({"type": "Adam", "learningRate": 0.001}),
                flags: "--local --optimizer adam --learning-rate 0.001",
            },
        ]
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        gpu: GpuArgs,
    }

    #[test]
    fn both_loops_are_told_the_same_model_and_steps() {
        let args = Flags::try_parse_from("bench --steps 7 --windows 64 --hidden 512".split(' ')).expect("flags").gpu;
        let [mnist, lm] = args.workloads();
        assert_eq!(mnist.train, "train mnist --device cuda --max-steps 7 --epochs 1000 --batch-size 1024");
        assert!(lm.train.starts_with("train lm --embedding 256 --hidden 512 --device cuda"), "{}", lm.train);
        for measured in [mnist, lm] {
            let rate = measured.optimizer["learningRate"].to_string();
            assert!(measured.flags.contains(&format!("--learning-rate {rate}")), "{}: {rate}", measured.flags);
        }
    }
}
