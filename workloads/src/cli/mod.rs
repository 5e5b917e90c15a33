//! The command line of `psjobs-worker`: `serve`, `train` with a subcommand for each workload, `store`, and `track`.

mod evaluate;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use psjobs_process::store::{self, StoreArgs};
use psjobs_process::track::{self, TrackArgs};
use psjobs_process::{OutputArgs, conclude};
use psjobs_worker::cli::evaluate::ServeCommand;

use crate::workload;
use evaluate::Evaluated;

/// Parameter servers and trainers of a psjobs job.
///
/// The operator and `psjobs run` start both with their place in the job in the environment. By hand,
/// start each in a terminal of its own:
///
///   psjobs-worker serve
///
///   psjobs-worker train mnist
///
/// and with more processes, one --rank each: servers come first, then trainers.
#[derive(Clone, Debug, Parser)]
#[command(name = "psjobs-worker", version, verbatim_doc_comment)]
pub struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Runs a parameter server until every trainer has left
    Serve(ServeCommand<Evaluated>),
    /// Trains a workload
    Train(train::TrainCommand),
    /// Lists and reads what a job keeps in a folder or an object store
    Store(StoreArgs),
    /// Sends MLflow what it lacks of a job that is over
    Track(TrackArgs),
}

/// Parses the command line, does what it says, and says why when that fails.
#[must_use]
pub fn main() -> ExitCode {
    let Cli { output, command } = Cli::parse();
    ExitCode::from(conclude(output, || match command {
        Command::Serve(command) => {
            command.run(|gpus| Ok(workload::offered(gpus)), |serve, registry, evaluated| evaluated.run(serve, registry))
        }
        Command::Train(command) => train::run(&command),
        Command::Store(args) => store::run(&args),
        Command::Track(args) => track::run(&args),
    }))
}
