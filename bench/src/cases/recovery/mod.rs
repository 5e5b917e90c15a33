//! How long training stands still when a server is lost: with a second server that holds its blocks, whose process is
//! killed, whose machine vanishes, or which is replaced while it lives on; and from a checkpoint. The servers are processes
//! of this program.

mod checkpoint;
mod replica;
mod running;
mod silent;
mod zombie;

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::namespace::OtherMachine;
use crate::report::{Case, LeftOut, Line, say};

/// Seconds until training goes on after the loss of a server
///
/// In `replica` one of two servers that hold all parameters is killed (limit: an undisturbed step); in `replica-silent` its
/// machine vanishes without a word (limit: 10 s and a step); in `replica-zombie` it is replaced and lives on with its
/// connections, and the time is from the moment at which the successor listens (limit: 10 s). In `checkpoint` the only
/// server is killed, and the time is from the start of its successor (limit: reading the file). After each the
/// parameters are compared with what the steps must make of them.
///
/// The machine that vanishes is a network namespace, which takes root and the program ip (iproute2). Elsewhere
/// `replica-silent` is left out.
#[derive(Debug, Args)]
pub struct RecoveryArgs {
    /// Size of the parameters for `replica`, `replica-silent` and `replica-zombie` in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Size of the parameters for `checkpoint` in MB
    #[arg(long, value_name = "MB", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    checkpoint_megabytes: u32,
    /// Measure this case only; more than once for several
    #[arg(long = "case", value_enum, value_name = "CASE")]
    cases: Vec<Loss>,
}

/// The cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Loss {
    Replica,
    ReplicaSilent,
    ReplicaZombie,
    Checkpoint,
}

/// A figure and its limit.
type Figure = (f64, f64);

/// Steps before a server is lost, and after.
const BEFORE: u64 = 10;
const AFTER: u64 = 20;
/// Nothing here takes so long.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long training may stand still when nothing reports that a server is lost, in seconds.
const SILENT: f64 = 10.0;

impl RecoveryArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let losses = if self.cases.is_empty() { Loss::value_variants() } else { &self.cases };
        losses.iter().map(|loss| self.case(*loss, runs)).collect()
    }

    fn case(&self, loss: Loss, runs: u32) -> anyhow::Result<Line> {
        // Server 0, which knows the whole job, and the other one in turn.
        let victim = |run: u32| (run % 2) as usize;
        match loss {
            Loss::Replica => repeat("replica", runs, |run| replica::measure(self.megabytes, victim(run))),
            Loss::ReplicaSilent => match OtherMachine::make().map(drop) {
                Ok(()) => repeat("replica-silent", runs, |run| silent::measure(self.megabytes, victim(run))),
                Err(error) => {
                    let left_out = format!("{error:#}");
                    Ok(Line::LeftOut(LeftOut { bench: "recovery", case: "replica-silent", left_out }))
                }
            },
            Loss::ReplicaZombie => repeat("replica-zombie", runs, |run| zombie::measure(self.megabytes, victim(run))),
            Loss::Checkpoint => repeat("checkpoint", runs, |_| checkpoint::measure(self.checkpoint_megabytes)),
        }
    }
}

fn repeat(case: &'static str, runs: u32, measure: impl Fn(u32) -> anyhow::Result<Figure>) -> anyhow::Result<Line> {
    let (mut values, mut limits) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        say(&format!("recovery {case}: run {run} of {runs}"));
        let (value, limit) = measure(run)?;
        values.push(value);
        limits.push(limit);
    }
    Ok(Case::new("recovery", case, "s", &values, &limits).into())
}
