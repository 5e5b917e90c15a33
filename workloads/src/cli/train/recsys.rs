//! `train recsys`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::anyhow;
use clap::Args;
use psjobs_api::ReplicaResult;
use psjobs_ps::sparse::TableSpec;
use tch::Device;
use tracing::info;

use super::remote::RemoteArgs;
use crate::data::clicks::criteo::{CATEGORIES, Log, LogError, NUMBERS};
use crate::data::clicks::generator::{Generator, MOST_KEYS};
use crate::data::clicks::{Clicks, Source};
use crate::workload::recsys::{self, RecsysError, Settings};
use psjobs_process::Failure;
use psjobs_process::signals::Signal;
use psjobs_worker::cli::training_length::TrainingLengthArgs;
use psjobs_worker::train::Plan;
use psjobs_worker::train::modules::ModulesError;

/// The largest initial value in a row.
const INITIAL: f32 = 0.05;

/// Flags of `train recsys`.
#[derive(Clone, Debug, Args)]
pub struct RecsysArgs {
    /// File of clicks in the format of Criteo's logs: 1 or 0, numbers, categories, parted by tabs [default:
    /// clicks are generated]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// With --data FILE: numbers in an example [default: 13]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), requires = "data")]
    numbers: Option<u32>,
    /// With --data FILE: categories in an example [default: 26]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255), requires = "data")]
    categories: Option<u32>,
    /// Generated clicks: keys of the largest category; the next ones have a tenth each, down to ten
    #[arg(long, value_name = "N", default_value_t = 100_000_000, value_parser = clap::value_parser!(u64).range(10..=MOST_KEYS))]
    keys: u64,
    /// Generated clicks: examples to train on
    #[arg(long, value_name = "N", default_value_t = 400_000, value_parser = clap::value_parser!(u64).range(1..))]
    examples: u64,
    /// Examples to test on, not trained on; of a file the last ones
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    held_out: u64,
    /// Numbers in a row of the table
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    width: u32,
    /// Units of the layers for the numbers, before the one of the row's width
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "64", value_parser = clap::value_parser!(i64).range(1..=65_536))]
    lower: Vec<i64>,
    /// Units of the layers on top, before the score
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "128,64", value_parser = clap::value_parser!(i64).range(1..=65_536))]
    upper: Vec<i64>,
    /// Rows that the servers keep, roughly, the ones used last [default: all that were trained]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_rows: u64,
    /// Steps after which a row that no trainer has used goes [default: it stays]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    idle_steps: u64,
    /// Seconds after which a row that no trainer has used goes [default: it stays]
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    idle_seconds: u64,
    /// Train in this process alone, without servers
    #[arg(
        long,
        conflicts_with_all = ["world_size", "rank", "servers", "master_addr", "master_port", "server_addrs"]
    )]
    local: bool,
    #[command(flatten)]
    extent: TrainingLengthArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl RecsysArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        let (environment, training, signals) = self.remote.begin_or_alone(self.local)?;
        let plan = self.extent.plan(environment.as_ref(), Device::Cpu);
        let plan = Plan { seed: training.seed, ..plan };
        let (clicks, held_out) = self.clicks(training.seed)?;
        if self.upper.is_empty() {
            return Err(Failure::Input(anyhow!("--upper needs at least one layer, for example 64")));
        }
        let table = TableSpec {
            max_rows: self.max_rows,
            idle_steps: self.idle_steps,
            idle_ms: self.idle_seconds * 1000,
            ..TableSpec::new("clicks", self.width as usize, INITIAL)
        };
        let settings = Settings {
            plan,
            table,
            layers: (self.lower.clone(), self.upper.clone()),
            training,
            connect_timeout: self.remote.connect_timeout(environment.as_ref()),
            interrupt: signals.stop(),
        };
        let stop = || signals.heard().is_some();
        let outcome = recsys::train(environment.as_ref(), &clicks, &held_out, &settings, || signals.defer(), stop);
        let supervised = environment.as_ref().is_some_and(|environment| environment.supervised);
        match outcome.map_err(|error| classify(error, supervised))? {
            Some(result) => {
                info!(steps = result.steps, seconds = result.seconds, metrics = ?result.metrics, "finished");
                Ok(result)
            }
            None => Err(Failure::Signal(signals.heard().unwrap_or(Signal(15)))),
        }
    }

    /// Returns the clicks to train on, and those held out.
    fn clicks(&self, seed: u64) -> Result<(Clicks, Clicks), Failure> {
        let Some(file) = &self.data else {
            let generator = Generator::new(seed, self.keys);
            info!(keys = generator.keys(), categories = generator.categories(), "clicks are generated");
            let source = Source::Generated(Arc::new(generator));
            let end = self.examples.saturating_add(self.held_out);
            return Ok((Clicks::new(source.clone(), 0..self.examples), Clicks::new(source, self.examples..end)));
        };
        let numbers = self.numbers.map_or(NUMBERS, |count| count as usize);
        let log = Log::open(file, numbers, self.categories.map_or(CATEGORIES, |count| count as usize));
        let log = log.map_err(Failure::opening)?;
        let (found, held_out) = (log.len(), self.held_out as usize);
        if found <= held_out {
            return Err(Failure::input(LogError::TooFew { file: file.clone(), found, held_out }));
        }
        info!(file = %file.display(), examples = found, "clicks are read");
        let (source, split) = (Source::Read(Arc::new(log)), (found - held_out) as u64);
        Ok((Clicks::new(source.clone(), 0..split), Clicks::new(source, split..found as u64)))
    }
}

/// Gives an error of the training the exit code 2 only if another start would end the same way, and 75 if other processes
/// alone are the cause: one that is away, or, where somebody (`supervised`) starts processes again, a wrong one.
fn classify(error: RecsysError, supervised: bool) -> Failure {
    match error {
        RecsysError::TooFewExamples(_) | RecsysError::Table(_) | RecsysError::Tls(_) => Failure::input(error),
        RecsysError::Open(ref why) | RecsysError::Join(ModulesError::Join(ref why)) if why.is_input() => {
            Failure::input(error)
        }
        _ if error.is_caused_by_others(supervised) => Failure::peer_away(error),
        _ => Failure::work(error),
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::exit_code::{PEER_AWAY, WRONG_INPUT};
    use psjobs_ps::client::ClientError;
    use psjobs_ps::sparse::SpecError;
    use psjobs_rpc::RemoteError;

    use super::*;
    use crate::allreduce::RingError;

    #[test]
    fn only_what_a_trainer_was_given_is_bad_input_and_only_other_processes_excuse_it() {
        let text = || String::from("no");
        let away = || ClientError::Unreachable { address: text(), seconds: 120, reason: text() };
        let conflict = || ClientError::Conflict { address: text(), reason: text() };
        let misplaced = || ClientError::Misplaced { address: text(), found: 1, servers: 2, want: 0, ours: 2 };
        let refused = || ClientError::Refused { address: text(), reason: text() };
        let join = |error| RecsysError::Join(ModulesError::Join(error));
        let leave = |error| RecsysError::Leave(ModulesError::Leave(error));
        let rows_at = |source| RecsysError::Rows { step: 3, source };
        let (by_hand, supervised) = (false, true);
        let (input, work, peer) = (WRONG_INPUT as u8, 1, PEER_AWAY as u8);
        let rows = [
            (RecsysError::Table(SpecError::Count(0)), supervised, input),
            (join(refused()), supervised, input),
            (join(away()), by_hand, peer),
            (join(conflict()), by_hand, work),
            (join(conflict()), supervised, peer),
            (join(misplaced()), by_hand, work),
            (join(misplaced()), supervised, peer),
            (leave(conflict()), by_hand, work),
            (leave(conflict()), supervised, peer),
            (RecsysError::Open(refused()), supervised, input),
            (RecsysError::Open(misplaced()), by_hand, work),
            (RecsysError::Open(misplaced()), supervised, peer),
            (RecsysError::Follow(conflict()), by_hand, work),
            (RecsysError::Follow(conflict()), supervised, peer),
            (RecsysError::Evaluate(conflict()), by_hand, work),
            (RecsysError::Evaluate(conflict()), supervised, peer),
            (rows_at(refused()), supervised, work),
            (rows_at(ClientError::TablesLost { address: text() }), by_hand, peer),
            (rows_at(conflict()), by_hand, work),
            (rows_at(conflict()), supervised, peer),
            (RecsysError::Publish(RemoteError::new("no")), supervised, work),
            (RecsysError::Meet(RingError::Absent { rank: 1, seconds: 60, reason: text() }), by_hand, peer),
            (RecsysError::Meet(RingError::Interrupted), supervised, work),
            (RecsysError::Diverged { step: 3, loss: f64::NAN }, supervised, work),
        ];
        for (error, supervised, want) in rows {
            let label = format!("{error:?}, supervised: {supervised}");
            assert_eq!(classify(error, supervised).exit_code(), want, "{label}");
        }
    }
}
