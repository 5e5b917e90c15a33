//! The benchmarks, one file each. Each case is measured against a limit taken in the same run. Machines are noisy, so
//! a case and its limit alternate and the medians count.

mod data;
mod gpu;
mod hostile;
mod hybrid;
mod link;
mod local;
mod metrics;
mod optimizers;
mod overlap;
mod recovery;
mod remote;
mod rl;
mod scaling;
mod snapshot;
mod store;
pub(crate) mod together;
mod trainers;
mod waiting;
mod wire;

use std::io::Write as _;

use clap::{Args, Subcommand};

use self::together::TogetherArgs;
use crate::report::Line;
use crate::server::ServerArgs;

/// Measure speed against a limit of this machine
///
/// Prints a table, or with --json one object a line: bench, case, unit, value, limit, ratio, min, max and
/// runs. Value and limit are medians; min and max are of the value. Of a case that cannot be measured here the object has
/// bench, case and left_out, which says why.
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
    /// Steps/s of two trainers and one server, and of two local loops at once, over twice one local loop's
    Mnist(TogetherArgs),
    /// Tokens/s of the language model, likewise
    Lm(TogetherArgs),
    Wire(wire::WireArgs),
    Link(link::LinkArgs),
    Overlap(overlap::OverlapArgs),
    Local(local::LocalArgs),
    Optimizers(optimizers::OptimizersArgs),
    Recovery(recovery::RecoveryArgs),
    Hostile(hostile::HostileArgs),
    Remote(remote::RemoteArgs),
    Rl(rl::RlArgs),
    Gpu(gpu::GpuArgs),
    Hybrid(hybrid::HybridArgs),
    Waiting(waiting::WaitingArgs),
    Trainers(trainers::TrainersArgs),
    Scaling(scaling::ScalingArgs),
    Metrics(metrics::MetricsArgs),
    Snapshot(snapshot::SnapshotArgs),
    Store(store::StoreArgs),
    Data(data::DataArgs),
    #[command(hide = true)]
    Server(ServerArgs),
    #[command(hide = true)]
    Peer(link::PeerArgs),
}

impl BenchArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let lines = self.bench.run(self.runs)?;
        if lines.is_empty() {
            return Ok(0); // It has been said why.
        }
        let text = if self.json {
            lines.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?.join("\n")
        } else {
            let heading = format!(
                "{:<24}{:<12}{:>10}{:>10}{:>8}{:>10}{:>10}",
                "case", "unit", "value", "limit", "ratio", "min", "max"
            );
            [heading].into_iter().chain(lines.iter().map(Line::to_string)).collect::<Vec<_>>().join("\n")
        };
        // A reader that has gone away wants no report.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(0)
    }
}

impl Bench {
    /// Returns the lines of the report; none if there is nothing to measure, or nothing to report.
    fn run(self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let cases = match self {
            Self::Mnist(args) => args.measure(&together::MNIST, runs)?,
            Self::Lm(args) => args.measure(&together::LM, runs)?,
            Self::Wire(args) => args.measure(runs)?,
            Self::Optimizers(args) => args.measure(runs),
            Self::Link(args) => return args.measure(runs),
            Self::Overlap(args) => return args.measure(runs),
            Self::Local(args) => return args.measure(runs),
            Self::Recovery(args) => return args.measure(runs),
            Self::Hostile(args) => return args.measure(runs),
            Self::Store(args) => return args.measure(runs),
            Self::Remote(args) => args.measure(runs)?,
            Self::Rl(args) => args.measure(runs)?,
            Self::Gpu(args) => args.measure(runs)?,
            Self::Hybrid(args) => args.measure(runs)?,
            Self::Waiting(args) => args.measure(runs)?,
            Self::Trainers(args) => return args.measure(runs),
            Self::Scaling(args) => return args.measure(runs),
            Self::Metrics(args) => args.measure(runs)?,
            Self::Snapshot(args) => args.measure(runs)?,
            Self::Data(args) => args.measure(runs)?,
            Self::Server(args) => {
                args.serve()?;
                Vec::new()
            }
            Self::Peer(args) => {
                args.serve()?;
                Vec::new()
            }
        };
        Ok(cases.into_iter().map(Line::Measured).collect())
    }
}
