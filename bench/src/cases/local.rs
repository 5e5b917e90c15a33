//! Measures what exchanging costs trainers that make steps alone (`spec.training.local`): how many tokens two of them read,
//! over what as many processes read that train alone at the same time. On this machine, and over a slow link where network
//! namespaces may be made.

use std::path::PathBuf;

use clap::Args;
use psjobs_api::Training;
use serde_json::{Value, json};

use super::together::LM;
use crate::compare::link::{self, Link};
use crate::job::{self, run};
use crate::report::{Case, LeftOut, Line, say};

/// Tokens/s of two trainers of the language model that make steps alone, over two local loops at once
///
/// Cases: on this machine, and over a link of --link-mbit with exchanges that overlap the next steps, there without the
/// exchange at the end, which has no next steps.
#[derive(Debug, Args)]
pub struct LocalArgs {
    /// Steps that a trainer makes for one exchange
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    local_steps: u32,
    /// Exchanges of each trainer in each run
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    exchanges: u32,
    /// Speed of the slow link in Mb/s each way; 0: none, which needs no root
    #[arg(long, value_name = "MBIT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=100_000))]
    link_mbit: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

const BENCH: &str = "local";
const SLOW_LINK: &str = "over-a-slow-link";
const TRAINERS: u32 = 2;
/// Flags of a process that trains alone.
const ALONE: [&str; 5] = ["--local", "--threads", "1", "--optimizer", "adam"];

impl LocalArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let worker = job::worker(self.worker.as_deref())?;
        let steps = self.local_steps * self.exchanges;
        let args = format!("{} --max-steps {steps}", LM.train);
        let train: Vec<&str> = args.split_whitespace().collect();
        let here = job::job("bench-local", self.training(false), TRAINERS, &train)?;
        let alone: Vec<&str> = train.iter().copied().chain(ALONE).collect();
        let link = match self.link_mbit {
            0 => Err("left out by --link-mbit 0".to_owned()),
            mbit => Link::make(mbit).map_err(|error| format!("{error:#}")),
        };
        let overlapping: Training = serde_json::from_value(self.training(true))?;
        let over_link = link::Job { worker: &worker, workload: "lm", training: &overlapping, trainers: TRAINERS };
        let tokens = |steps_per_second: f64| steps_per_second * LM.per_step;
        let [mut loops, mut on_machine, mut on_link] = [const { Vec::new() }; 3];
        for turn in 1..=runs {
            say(&format!("local: run {turn} of {runs}"));
            loops.push(tokens(job::loops_at_once(&worker, &alone, TRAINERS)?));
            let summary = run(&here, &worker)?;
            on_machine.push(tokens(summary.steps_per_second.unwrap_or_default()));
            if let Ok(link) = &link {
                // Nothing hides the exchange at the end, which long training does not notice.
                let [some, twice] = [1, 2].map(|times| link.train(over_link, times * steps));
                on_link.push(tokens(f64::from(steps * TRAINERS) / (twice?.1 - some?.1)));
            }
        }
        let line = |case, rates: &[f64]| Line::Measured(Case::new(BENCH, case, LM.unit, rates, &loops));
        Ok(vec![
            line("2-trainers-1-server", &on_machine),
            match link {
                Ok(_) => line(SLOW_LINK, &on_link),
                Err(left_out) => Line::LeftOut(LeftOut { bench: BENCH, case: SLOW_LINK, left_out }),
            },
        ])
    }

    fn training(&self, overlap: bool) -> Value {
        let mut training = (LM.training)();
        training["consistency"] = json!({"mode": "Sync"});
        training["local"] = json!({"steps": self.local_steps, "overlap": overlap});
        training
    }
}
