//! How much of their time trainers spend waiting for others and for the network: where each is slow now and then,
//! and where one is slow for good. A step's computing is a rest of stated length, so that trainers on one machine
//! do not take its cores from each other.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};

use crate::job;
use crate::report::{Case, say};
use psjobs::run::Summary;

/// Share of the trainers' time spent waiting, in %
///
/// Four trainers. In `sync` and `bounded-8` a random 2 % of the steps of each take five times as long; in
/// `slow-trainer-sync` and `slow-trainer-adaptive` one takes three times as long for every example, and the others'
/// waiting counts. The limit of the second of each pair is the first; that of the first is what follows from the
/// slowdowns alone, if the network took no time.
#[derive(Debug, Args)]
pub struct WaitingArgs {
    /// Steps of each trainer
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Milliseconds that an example takes; a step has 32
    #[arg(long, value_name = "MS", default_value_t = 1.25)]
    example_ms: f64,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

const TRAINERS: u32 = 4;
/// A slow step takes so many times as long, and this share of the steps is slow.
const NOW_AND_THEN: (f64, f64) = (5.0, 0.02);
/// The last trainer's examples take so many times as long.
const FOR_GOOD: f64 = 3.0;

impl WaitingArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = job::worker(self.worker.as_deref())?;
        let [mut sync, mut bounded, mut slow, mut adaptive] = [const { Vec::new() }; 4];
        let (factor, share) = NOW_AND_THEN;
        let (random, steady) = (format!("all:{factor}:{share}"), format!("{}:{FOR_GOOD}", TRAINERS - 1));
        for run in 1..=runs {
            let measure = |case: &str, training: Value, slow: &str| {
                say(&format!("waiting {case}: run {run} of {runs}"));
                job::run(&self.job(training, slow, run)?, &worker)
            };
            sync.push(of_all(&measure("sync", json!({"consistency": {"mode": "Sync"}}), &random)?)?);
            let rule = json!({"consistency": {"mode": "Bounded", "staleness": 8}});
            bounded.push(of_all(&measure("bounded-8", rule, &random)?)?);
            let rule = json!({"consistency": {"mode": "Sync"}});
            slow.push(of_fast(&measure("slow-trainer-sync", rule, &steady)?)?);
            let rule = json!({"consistency": {"mode": "Sync"}, "batch": {"adaptive": true}});
            adaptive.push(of_fast(&measure("slow-trainer-adaptive", rule, &steady)?)?);
        }
        let case = |name, values: &[f64], limits: &[f64]| Case::new("waiting", name, "% of time", values, limits);
        Ok(vec![
            case("sync", &sync, &[100.0 * waiting_now_and_then(TRAINERS, factor, share)]),
            case("bounded-8", &bounded, &sync),
            case("slow-trainer-sync", &slow, &[100.0 * (1.0 - 1.0 / FOR_GOOD)]),
            case("slow-trainer-adaptive", &adaptive, &slow),
        ])
    }

    /// Other steps are slow in each run.
    fn job(&self, mut training: Value, slow: &str, run: u32) -> anyhow::Result<ParameterServerJob> {
        training["seed"] = json!(run);
        let (steps, example) = (self.steps.to_string(), self.example_ms.to_string());
        let args =
            ["train", "mlp", "--epochs", "1000", "--max-steps", &steps, "--example-ms", &example, "--slow", slow];
        job::job("bench-waiting", training, TRAINERS, &args)
    }
}

/// In Sync a step takes as long as its slowest trainer: 1 - what a trainer needs over that.
fn waiting_now_and_then(trainers: u32, factor: f64, share: f64) -> f64 {
    let needs = |slow: f64| 1.0 + (factor - 1.0) * slow;
    let any = 1.0 - (1.0 - share).powi(trainers.cast_signed());
    1.0 - needs(share) / needs(any)
}

/// Returns the share of all trainers, in %.
fn of_all(summary: &Summary) -> anyhow::Result<f64> {
    Ok(100.0 * summary.waiting_share.context("the trainers left no result")?)
}

/// Returns the share of all but the last trainer, in %.
fn of_fast(summary: &Summary) -> anyhow::Result<f64> {
    let shares = summary.waiting_shares.iter().take(TRAINERS as usize - 1).copied().collect::<Option<Vec<_>>>();
    let shares = shares.filter(|shares| !shares.is_empty()).context("the trainers left no result")?;
    Ok(100.0 * shares.iter().sum::<f64>() / shares.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_slow_steps_cost_in_sync_follows_from_how_often_they_are() {
        for (trainers, factor, share, want) in [(1, 5.0, 0.02, 0.0), (4, 5.0, 1.0, 0.0), (2, 3.0, 0.5, 0.2)] {
            let got = waiting_now_and_then(trainers, factor, share);
            assert!((got - want).abs() < 1e-9, "{trainers} trainers, {factor} times in {share}: {got}");
        }
    }
}
