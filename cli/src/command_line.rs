//! The command line of `psjobs`, whichever program has it: the binary, or the Python package.

use clap::{Parser, Subcommand};

use crate::plugin::{self, PluginArgs};
use crate::{certificates, estimate, run, validate};

/// Parameter-server training, on this machine and on Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "psjobs", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Validate(validate::ValidateArgs),
    Estimate(Box<estimate::EstimateArgs>),
    /// Measure speed against a limit of this machine (calls psjobs-bench)
    #[command(disable_help_flag = true)]
    Bench(PluginArgs),
    /// Compare ways to train on MNIST, as a page with plots (calls psjobs-compare)
    #[command(disable_help_flag = true)]
    Compare(PluginArgs),
    Certificates(certificates::CertificatesArgs),
}

impl Cli {
    /// Does what the command line says, and returns the exit code.
    ///
    /// # Errors
    /// If the command fails; the text says why.
    pub fn run(self) -> anyhow::Result<u8> {
        match self.command {
            Command::Run(args) => args.run(),
            Command::Validate(args) => args.run(),
            Command::Estimate(args) => args.run(),
            Command::Bench(args) => plugin::call("psjobs-bench", &args),
            Command::Compare(args) => plugin::call("psjobs-compare", &args),
            Command::Certificates(args) => args.run(),
        }
    }
}
