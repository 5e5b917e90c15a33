//! The user's command: runs and checks ParameterServerJobs on this machine, and calls the programs that measure them.

use std::process::ExitCode;

use clap::Parser as _;
use psjobs::command_line::Cli;

fn main() -> ExitCode {
    psjobs::main(|| Cli::parse().run())
}
