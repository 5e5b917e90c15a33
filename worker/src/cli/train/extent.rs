//! How long a trainer trains and how much it reads in a step: flags that every training loop has.

use clap::Args;
use psjobs_api::{Environment, Training};
use tch::Device;

use crate::train::Plan;
use crate::train::slowdown::Slowdown;

/// Flags of every workload that reads its data in steps.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ExtentArgs {
    /// Passes over the training set, of all trainers together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// End after this many steps, even if the epochs are not over
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,
    /// Examples this trainer reads in one step [default: the job's batch.base, 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_size: Option<u32>,
    /// Steps between two lines in the log
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Slow a trainer down, to see how the job copes: TRAINER|all:FACTOR[:SHARE of its steps], as 1:3 or all:5:0.02
    #[arg(long, value_name = "WHO:FACTOR")]
    slow: Option<Slowdown>,
}

impl ExtentArgs {
    /// What the flags and the job say, for a trainer that evaluates at the end and saves nothing; `None`
    /// for one that trains alone.
    pub fn plan(&self, environment: Option<&Environment>, device: Device) -> Plan {
        let alone = Training::default();
        let training = environment.map_or(&alone, |environment| &environment.training);
        Plan {
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch: self.batch_size.unwrap_or(training.batch.base) as usize,
            seed: training.seed,
            trainer: environment.map_or(0, |environment| environment.index as usize),
            trainers: environment.map_or(1, |environment| environment.trainers as usize),
            device,
            log_every: self.log_every,
            evaluate_every: None,
            slow: self.slow,
            save: None,
        }
    }
}
