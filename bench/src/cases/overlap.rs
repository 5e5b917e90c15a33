//! Measures what is left of a step's exchange where gradients leave while backward() runs, and where the next step is computed
//! meanwhile: the language model trains with its server behind a link on which its exchange alone takes about as long as its
//! computing alone.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use psjobs_api::training::{Codec, ConsistencyMode};
use psjobs_api::{DEFAULT_PORT, Environment, Role};

use super::together::LM;
use super::wire::{train_all, training};
use crate::job;
use crate::namespace::OtherMachine;
use crate::processes::{Job, Process};
use crate::report::{Case, LeftOut, Line, say};

/// Parameters of the language model.
const ELEMENTS: usize = 9_300_000;

/// Steps/s where computing and exchange take equally long, over those of the slower of the two alone
///
/// Cases: gradients that leave during backward() and after it, and in Async exchanges that the next step overlaps
/// (spec.training.consistency.overlap) and that it waits for.
///
/// The server runs in a network namespace, which takes root and the programs ip and tc (iproute2).
#[derive(Debug, Args)]
pub struct OverlapArgs {
    /// Steps of each run
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

/// A way to train.
struct Way {
    case: &'static str,
    mode: ConsistencyMode,
    /// The next step is computed while an exchange is under way.
    overlap: bool,
    flags: &'static [&'static str],
}

/// Gradients that leave during backward().
const PLAIN: Way = Way { case: "lm", mode: ConsistencyMode::Sync, overlap: false, flags: &[] };

/// The ways: for comparison gradients that leave after backward(), and exchanges that overlap the next step beside the same without.
const WAYS: [Way; 4] = [
    PLAIN,
    Way { case: "lm-no-overlap", flags: &["--no-overlap"], ..PLAIN },
    Way { case: "lm-async", mode: ConsistencyMode::Async, ..PLAIN },
    Way { case: "lm-overlap-exchanges", mode: ConsistencyMode::Async, overlap: true, ..PLAIN },
];

impl OverlapArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let worker = job::worker(self.worker.as_deref())?;
        let machine = match OtherMachine::make() {
            Ok(machine) => machine,
            Err(error) => {
                let left_out = |way: Way| LeftOut { bench: "overlap", case: way.case, left_out: format!("{error:#}") };
                return Ok(WAYS.map(left_out).map(Line::LeftOut).into());
            }
        };
        say("overlap: measures the computing alone");
        let computing = self.computing(&worker)?;
        let rate = computing * ELEMENTS as f64 * 32.0;
        machine.limit(rate as u64)?;
        say(&format!(
            "overlap: a link of {:.2} Gbit/s, over which an exchange takes {:.0} ms",
            rate / 1e9,
            1e3 / computing
        ));
        let (mut limits, mut rates) = (Vec::new(), [const { Vec::new() }; WAYS.len()]);
        for run in 1..=runs {
            say(&format!("overlap: run {run} of {runs}"));
            limits.push(self.computing(&worker)?.min(self.exchange(&machine)?));
            for (way, rates) in WAYS.iter().zip(&mut rates) {
                rates.push(self.together(&machine, &worker, way)?);
            }
        }
        let case =
            |(way, rates): (&Way, &Vec<f64>)| Line::Measured(Case::new("overlap", way.case, "steps/s", rates, &limits));
        Ok(WAYS.iter().zip(&rates).map(case).collect())
    }

    /// The arguments of a worker that trains.
    fn arguments(&self) -> Vec<String> {
        let words = LM.train.split_whitespace().map(str::to_owned);
        words.chain(["--max-steps".into(), self.steps.to_string()]).collect()
    }

    /// Steps/s of one process that computes alone.
    fn computing(&self, worker: &Path) -> anyhow::Result<f64> {
        let mut arguments = self.arguments();
        arguments.push("--local".into());
        job::alone(worker, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Steps/s of exchanges alone.
    fn exchange(&self, machine: &OtherMachine) -> anyhow::Result<f64> {
        let (job, mut server) = start(machine, &PLAIN)?;
        let elapsed = train_all(&job.environment, ELEMENTS, self.steps, false)?;
        server.wait()?;
        Ok(f64::from(self.steps) / elapsed.as_secs_f64())
    }

    /// Steps/s of a trainer.
    fn together(&self, machine: &OtherMachine, worker: &Path, way: &Way) -> anyhow::Result<f64> {
        let (job, mut server) = start(machine, way)?;
        let place = Environment { role: Role::Trainer, ..job.environment.clone() };
        let mut command = Command::new(worker);
        let rate = job::steps_per_second(command.args(self.arguments()).args(way.flags).envs(place.to_vars()))?;
        server.wait()?;
        Ok(rate)
    }
}

/// A job of one trainer, and its server on the other machine.
fn start(machine: &OtherMachine, way: &Way) -> anyhow::Result<(Job, Process)> {
    let mut training = training(Codec::F32);
    training.consistency.mode = way.mode;
    training.consistency.overlap = way.overlap.then_some(true);
    let servers = vec![format!("{}:{DEFAULT_PORT}", machine.there())];
    let mut job = Job::at("bench-overlap", servers, 1, 1, training);
    job.elements = ELEMENTS;
    let (server, _) = Process::listening(&mut job.command(0, &machine.enter())?)?;
    Ok((job, server))
}
