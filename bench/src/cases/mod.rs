//! The benchmarks, one file each. Each case is measured against a limit taken in the same run. Machines are noisy, so
//! a case and its limit alternate and the medians count.

mod gpu;
mod hybrid;
mod optimizers;
mod recovery;
mod remote;
mod rl;
mod snapshot;
mod together;
mod trainers;
mod waiting;
mod wire;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use self::together::TogetherArgs;
use crate::processes;
use crate::report::Case;

/// Measure speed against a limit of this machine
///
/// Prints a table, or with --json one object a line: bench, case, unit, value, limit, ratio, min, max and
/// runs. Value and limit are medians; min and max are of the value.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
    /// Print one JSON object a line
    #[arg(long, global = true)]
    json: bool,
    /// How often each case and its limit are measured
    #[arg(long, global = true, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Steps/s of two trainers and one server, over twice one local loop's
    Mnist(TogetherArgs),
    /// Tokens/s of the language model, likewise
    Lm(TogetherArgs),
    Wire(wire::WireArgs),
    Optimizers(optimizers::OptimizersArgs),
    Recovery(recovery::RecoveryArgs),
    Remote(remote::RemoteArgs),
    Rl(rl::RlArgs),
    Gpu(gpu::GpuArgs),
    Hybrid(hybrid::HybridArgs),
    Waiting(waiting::WaitingArgs),
    Trainers(trainers::TrainersArgs),
    Snapshot(snapshot::SnapshotArgs),
    /// One server of the job that the environment tells of, as benchmarks start them
    #[command(hide = true)]
    Server,
}

impl BenchArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let cases = match self.bench {
            Bench::Mnist(args) => args.measure(&together::MNIST, self.runs)?,
            Bench::Lm(args) => args.measure(&together::LM, self.runs)?,
            Bench::Wire(args) => args.measure(self.runs)?,
            Bench::Optimizers(args) => args.measure(self.runs),
            Bench::Recovery(args) => args.measure(self.runs)?,
            Bench::Remote(args) => args.measure(self.runs)?,
            Bench::Rl(args) => args.measure(self.runs)?,
            Bench::Gpu(args) => args.measure(self.runs)?,
            Bench::Hybrid(args) => args.measure(self.runs)?,
            Bench::Waiting(args) => args.measure(self.runs)?,
            Bench::Trainers(args) => args.measure(self.runs)?,
            Bench::Snapshot(args) => args.measure(self.runs)?,
            Bench::Server => {
                processes::serve()?;
                return Ok(ExitCode::SUCCESS);
            }
        };
        if cases.is_empty() {
            return Ok(ExitCode::SUCCESS); // It has been said why.
        }
        let text = if self.json {
            cases.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?.join("\n")
        } else {
            let heading = format!(
                "{:<24}{:<12}{:>10}{:>10}{:>8}{:>10}{:>10}",
                "case", "unit", "value", "limit", "ratio", "min", "max"
            );
            [heading].into_iter().chain(cases.iter().map(Case::to_string)).collect::<Vec<_>>().join("\n")
        };
        // A reader that has gone away wants no report.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(ExitCode::SUCCESS)
    }
}
