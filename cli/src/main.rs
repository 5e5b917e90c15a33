//! The user's command: runs, checks and measures ParameterServerJobs on this machine.

mod bench;
mod certificates;
mod compare;
mod manifest;
mod run;
mod validate;

use std::fmt;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Parameter-server training, on this machine and on Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "psjobs", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::RunArgs),
    Validate(validate::ValidateArgs),
    Bench(bench::BenchArgs),
    Compare(compare::CompareArgs),
    Certificates(certificates::CertificatesArgs),
    /// Ends what `run` leaves behind if it is killed
    #[command(name = run::guard::COMMAND, hide = true)]
    Guard,
}

/// Something that the user gave cannot work; the text says what to write instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct BadInput(String);

impl BadInput {
    const EXIT_CODE: u8 = 2;

    fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string())
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => args.run(),
        Command::Validate(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Compare(args) => args.run(),
        Command::Certificates(args) => args.run(),
        Command::Guard => Ok(run::guard::main()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(if error.is::<BadInput>() { BadInput::EXIT_CODE } else { 1 })
    })
}
