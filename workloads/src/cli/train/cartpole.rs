//! `train cartpole`.

use clap::{Args, ValueEnum};
use psjobs_api::ReplicaResult;

use super::remote::{RemoteArgs, finish};
use crate::workload::cartpole;
use psjobs_process::Failure;

/// Flags of `train cartpole`.
#[derive(Clone, Debug, Args)]
pub struct CartPoleArgs {
    /// How an observer asks for actions: pair, select_action and report_reward for each step; packed,
    /// both in one call
    #[arg(long, value_name = "PROTOCOL", value_enum, default_value_t = Protocol::Pair)]
    protocol: Protocol,
    /// End after this many rounds, even if it is not solved
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    max_rounds: u64,
    /// Rounds between two lines in the log
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Before training let the first observer make this many calls that do nothing, and report their rate
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    measure_calls: Option<u32>,
    #[command(flatten)]
    remote: RemoteArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    Pair,
    Packed,
}

impl CartPoleArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        let (environment, signals) = self.remote.begin()?;
        let settings = cartpole::Settings {
            seed: environment.training.seed,
            learning_rate: environment.training.optimizer.learning_rate,
            packed: self.protocol == Protocol::Packed,
            max_rounds: self.max_rounds,
            log_every: self.log_every,
            measure_calls: self.measure_calls,
            connect_timeout: self.remote.connect_timeout(Some(&environment)),
        };
        let stop = || signals.heard().is_some();
        finish(cartpole::run(&environment, &settings, || signals.defer(), stop), &environment, &signals)
    }
}
