//! Measures the cost of servers for a trainer on a GPU: steps a second of one trainer on CUDA with a server on the
//! CPU, over those of the same loop without a server on the same GPU.

use std::path::PathBuf;

use clap::Args;

use super::together::{self, Workload};
use crate::job;
use crate::report::Case;
use psjobs::run::machine;

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

impl GpuArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        if machine::gpus().is_empty() {
            eprintln!("psjobs: this machine has no CUDA device, so nothing was measured");
            return Ok(Vec::new());
        }
        let worker = job::worker(self.worker.as_deref())?;
        let mut cases = Vec::new();
        for (Workload { name, training, .. }, train) in self.workloads() {
            let mut pair = job::Pair::new(&format!("bench-gpu-{name}"), training(), 1, &train)?;
            pair.job.spec.trainer.gpus = 1;
            let [together, alone] = pair.measure(&worker, runs)?;
            cases.push(Case::new("gpu", name, "steps/s", &together, &alone));
        }
        Ok(cases)
    }

    fn workloads(&self) -> [(Workload, String); 2] {
        let Self { steps, images, windows, hidden, .. } = self;
        let extent = |batch: &u32| format!("--device cuda --max-steps {steps} --epochs 1000 --batch-size {batch}");
        let lm = format!("train lm --embedding {} --hidden {hidden} {}", hidden / 2, extent(windows));
        [(together::MNIST, format!("train mnist {}", extent(images))), (together::LM, lm)]
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
    fn flags_shape_the_models_and_steps() {
        let args = Flags::try_parse_from("bench --steps 7 --windows 64 --hidden 512".split(' ')).expect("flags").gpu;
        let [(_, mnist), (_, lm)] = args.workloads();
        assert_eq!(mnist, "train mnist --device cuda --max-steps 7 --epochs 1000 --batch-size 1024");
        assert!(lm.starts_with("train lm --embedding 256 --hidden 512 --device cuda"), "{lm}");
    }
}
