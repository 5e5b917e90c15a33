//! The user's command: runs and checks ParameterServerJobs on this machine, and calls the programs that measure them.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use psjobs::plugin::{self, PluginArgs};
use psjobs::{certificates, run, validate};

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
    /// Measure speed against a limit of this machine (calls psjobs-bench)
    #[command(disable_help_flag = true)]
    Bench(PluginArgs),
    /// Compare ways to train on MNIST, as a page with plots (calls psjobs-compare)
    #[command(disable_help_flag = true)]
    Compare(PluginArgs),
    Certificates(certificates::CertificatesArgs),
}

fn main() -> ExitCode {
    psjobs::main(|| match Cli::parse().command {
        Command::Run(args) => args.run(),
        Command::Validate(args) => args.run(),
        Command::Bench(args) => plugin::call("psjobs-bench", &args),
        Command::Compare(args) => plugin::call("psjobs-compare", &args),
        Command::Certificates(args) => args.run(),
    })
}
