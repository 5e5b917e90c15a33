//! A program with a workload of its own: `serve` and `train` of `psjobs-worker`, with one workload, the
//! user's.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use psjobs_api::env::PSJOB_RESULT_FILE;

use super::logging::LogFormat;
use super::train::{Source, TrainArgs};
use super::{conclude, serve};
use crate::workload::Workload;

/// Parameter servers and trainers of one workload.
///
/// The operator and `psjobs run` start both with their place in the job in the environment. By hand,
/// start each in a terminal of its own, with `serve` and with `train`.
#[derive(Clone, Debug, Parser)]
#[command(version)]
struct Cli {
    /// How to log to standard error; RUST_LOG sets the level
    #[arg(long, global = true, help_heading = "Output", value_enum, default_value_t = LogFormat::Human)]
    log_format: LogFormat,
    /// File that takes the result as JSON when this process has done its work
    #[arg(long, global = true, help_heading = "Output", value_name = "FILE", env = PSJOB_RESULT_FILE)]
    result_file: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Runs a parameter server until every trainer has left
    Serve(serve::ServeArgs),
    /// Trains the workload
    Train(OwnArgs),
}

#[derive(Clone, Debug, clap::Args)]
struct OwnArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Arguments of the workload itself, after --
    #[arg(last = true, value_name = "ARGUMENT")]
    own: Vec<String>,
}

/// The whole program of a workload: parses the command line, trains what `open` reads or serves, and
/// says why when that fails. An error of `open` ends the process with one sentence and exit code 2.
#[must_use]
pub fn main<W: Workload>(open: impl FnOnce(&Source) -> anyhow::Result<W>) -> ExitCode {
    let Cli { log_format, result_file, command } = Cli::parse();
    conclude(log_format, result_file, || match command {
        Command::Serve(args) => serve::run(&args),
        Command::Train(args) => args.train.run_with(args.own, open),
    })
}
