//! A program with a workload of its own: `serve`, `train` and `store` of `psjobs-worker`, with one workload, the
//! user's.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use super::evaluate::{EvaluateArgs, ServeCommand};
use super::train::{Source, TrainArgs};
use crate::workload::Workload;
use psjobs_process::serve::refuse_gpus;
use psjobs_process::store::{self, StoreArgs};
use psjobs_process::{Failure, OutputArgs, conclude};
use psjobs_rpc::{Registry, rendezvous};

/// Parameter servers and trainers of one workload.
///
/// The operator and `psjobs run` start both with their place in the job in the environment. By hand,
/// start each in a terminal of its own, with `serve` and with `train`.
#[derive(Clone, Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Runs a parameter server until every trainer has left
    Serve(ServeCommand<CustomEvaluate>),
    /// Trains the workload
    Train(CustomTrain),
    /// Lists and reads what a job keeps in a folder or an object store
    Store(StoreArgs),
}

#[derive(Clone, Debug, clap::Args)]
struct CustomEvaluate {
    #[command(flatten)]
    evaluate: EvaluateArgs,
    /// Arguments of the workload itself, after --
    #[arg(last = true, value_name = "ARGUMENT")]
    own: Vec<String>,
}

#[derive(Clone, Debug, clap::Args)]
struct CustomTrain {
    #[command(flatten)]
    train: TrainArgs,
    /// Arguments of the workload itself, after --
    #[arg(last = true, value_name = "ARGUMENT")]
    own: Vec<String>,
}

/// The whole program of a workload: parses the command line, trains what `open` reads or serves, and
/// says why when that fails. An error of `open` ends the process with one sentence and
/// exit code 2, which fails the job; with 1, after which it is started again, if the system could not read now. Its
/// servers host no modules of psjobs' own workloads.
#[must_use]
pub fn main<W: Workload>(open: impl FnOnce(&Source) -> anyhow::Result<W>) -> ExitCode {
    let Cli { output, command } = Cli::parse();
    ExitCode::from(conclude(output, || match command {
        Command::Serve(command) => {
            command.run(offered, |serve, registry, args| args.evaluate.run(serve, registry, args.own.clone(), open))
        }
        Command::Train(args) => args.train.run_with(args.own, open),
        Command::Store(args) => store::run(&args),
    }))
}

/// Returns what a server hosts: nothing that computes on GPUs.
fn offered(gpus: u32) -> Result<Registry, Failure> {
    refuse_gpus(gpus)?;
    let mut registry = Registry::default();
    rendezvous::offer(&mut registry);
    Ok(registry)
}
