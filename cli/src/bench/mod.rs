//! `psjobs bench`: measures, each case against a limit taken in the same run. One file for each
//! benchmark. Machines are noisy, so a case and its limit take turns and the medians count.

mod gpu;
mod hybrid;
pub mod job;
mod optimizers;
pub mod processes;
mod recovery;
mod remote;
mod rl;
mod snapshot;
mod together;
mod trainers;
mod waiting;
mod wire;

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde::Serialize;

use self::together::TogetherArgs;

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

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Case {
    bench: &'static str,
    case: &'static str,
    unit: &'static str,
    value: f64,
    limit: f64,
    ratio: f64,
    min: f64,
    max: f64,
    runs: usize,
}

impl Case {
    /// `values` and `limits`: one of each a run, at least one.
    fn new(bench: &'static str, case: &'static str, unit: &'static str, values: &[f64], limits: &[f64]) -> Self {
        let (value, limit) = (median(values), median(limits));
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { bench, case, unit, value, limit, ratio: value / limit, min, max, runs: values.len() }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, unit, value, limit, ratio, min, max, .. } = self;
        write!(f, "{case:<24}{unit:<12}{value:>10.2}{limit:>10.2}{ratio:>8.3}{min:>10.2}{max:>10.2}")
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Says what is being measured, to whoever watches.
fn say(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{text}");
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_holds_medians_and_the_extremes_of_its_values() {
        let case = Case::new("b", "c", "steps/s", &[4.0, 1.0, 2.0], &[10.0, 2.0, 4.0, 6.0]);
        assert_eq!((case.value, case.limit, case.ratio), (2.0, 5.0, 0.4));
        assert_eq!((case.min, case.max, case.runs), (1.0, 4.0, 3));
    }
}
