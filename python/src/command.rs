//! The programs `psjobs` and `psjobs-worker` as functions: the package brings what a job on one machine needs.

use std::ffi::OsString;

use ::psjobs::command_line::Cli;
use ::psjobs::run::guard;
use clap::{Parser, Subcommand};
use psjobs_process::serve::{self, ServeArgs};
use psjobs_process::store::{self, StoreArgs};
use psjobs_process::{Failure, OutputArgs, conclude};
use pyo3::prelude::*;

/// Parameter servers of a psjobs job.
///
/// The psjobs-worker of the Python package: its servers hold parameters, and train nothing themselves.
#[derive(Debug, Parser)]
#[command(name = "psjobs-worker", version)]
struct Worker {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: WorkerCommand,
}

#[derive(Debug, Subcommand)]
enum WorkerCommand {
    /// Runs a parameter server until every trainer has left
    Serve(Box<ServeArgs>),
    /// Lists and reads what a job keeps in a folder or an object store
    Store(StoreArgs),
    /// Not part of the Python package
    #[command(hide = true)]
    Train {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        workload: Vec<OsString>,
    },
}

/// The program `psjobs` with these arguments; `own` are the first words of a command that starts it. Returns its exit code.
#[pyfunction]
pub fn psjobs(py: Python<'_>, own: Vec<OsString>, args: Vec<OsString>) -> u8 {
    py.detach(|| {
        guard::set_program(own);
        ::psjobs::main_with(args.first().map(OsString::as_os_str), || {
            match Cli::try_parse_from([&OsString::from("psjobs")].into_iter().chain(&args)) {
                Ok(cli) => cli.run(),
                Err(said) => Ok(print(&said)),
            }
        })
    })
}

/// The program `psjobs-worker` with these arguments. Returns its exit code.
#[pyfunction]
pub fn worker(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| match Worker::try_parse_from([OsString::from("psjobs-worker")].into_iter().chain(args)) {
        Ok(Worker { output, command: WorkerCommand::Serve(args) }) => conclude(output, || serve::run(&args)),
        Ok(Worker { output, command: WorkerCommand::Store(args) }) => conclude(output, || store::run(&args)),
        Ok(Worker { output, command: WorkerCommand::Train { .. } }) => conclude(output, || {
            let text = "the psjobs-worker of the Python package has no workloads; give the trainer a command, as python3 \
                        train.py, or build psjobs-worker with `make build` and name it with --worker";
            Err(Failure::Input(anyhow::anyhow!(text)))
        }),
        Err(said) => print(&said),
    })
}

/// Prints a help text or what is wrong with the arguments, and returns the exit code.
fn print(said: &clap::Error) -> u8 {
    // A reader that has gone away wants no text.
    said.print().ok();
    u8::try_from(said.exit_code()).unwrap_or(1)
}
