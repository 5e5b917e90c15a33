//! How long a trainer trains and how much it reads in a step: flags that every training loop has.

use std::time::Duration;

use clap::Args;
use psjobs_api::training::Autocast;
use psjobs_api::{Environment, Training};
use tch::Device;

use crate::train::Plan;
use crate::train::throttle::{Pace, Slowdown};

/// Flags of every workload that reads its data in steps.
#[derive(Clone, Debug, Args)]
pub struct TrainingLengthArgs {
    /// Passes over the training set, of all trainers together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// End after this many steps, even if the epochs are not over; in an elastic job those of all trainers together
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,
    /// Examples this trainer reads in one step [default: the job's batch.base, 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_size: Option<u32>,
    /// Steps between two lines in the log
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Slow a trainer down, to see how the job copes: TRAINER|all:FACTOR[:SHARE of its steps], as 1:3 or all:5:0.02;
    /// several add up
    #[arg(long, value_name = "WHO:FACTOR", value_delimiter = ',')]
    slow: Vec<Slowdown>,
    /// Take at least so long for each example, resting where this machine is faster: several trainers on one
    /// machine then are as slow as on their own ones
    #[arg(long, value_name = "MS", default_value_t = 0.0, hide_default_value = true, value_parser = milliseconds,
        allow_negative_numbers = true)]
    example_ms: f64,
}

impl TrainingLengthArgs {
    /// Returns the plan that the flags and the job give a trainer which evaluates at the end and saves nothing; without
    /// an `environment` it trains alone.
    pub fn plan(&self, environment: Option<&Environment>, device: Device) -> Plan {
        let alone = Training::default();
        let training = environment.map_or(&alone, |environment| &environment.training);
        Plan {
            epochs: self.epochs,
            max_steps: self.max_steps,
            elastic: environment.is_some_and(|environment| environment.min_trainers.is_some()),
            adaptive: false,
            steps_per_exchange: training.steps_per_exchange(),
            batch: self.batch_size.unwrap_or(training.batch.base) as usize,
            micro_batches: training.batch.micro_batches() as usize,
            autocast: training.precision().autocast == Autocast::BF16,
            non_finite: training.non_finite,
            seed: training.seed,
            trainer: environment.map_or(0, |environment| environment.index as usize),
            trainers: environment.map_or(1, |environment| environment.trainers as usize),
            device,
            log_every: self.log_every,
            evaluate_every: None,
            pace: Pace { example: Duration::from_secs_f64(self.example_ms / 1e3), slowdowns: self.slow.clone() },
            save: None,
        }
    }
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let fits = |ms: &f64| (0.0..=60_000.0).contains(ms);
    text.parse().ok().filter(fits).ok_or_else(|| "write milliseconds from 0 to 60000, for example 0.5".to_owned())
}
