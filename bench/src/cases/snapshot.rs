//! How long a checkpoint keeps training waiting: the time that exchanges take with a checkpoint each second, less
//! that without, for each checkpoint. The trainer computes nothing but rests between its steps, as one that has a
//! model would.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer};
use psjobs_ps::checkpoint::Runs;
use psjobs_ps::client::Session;

use crate::processes::Job;
use crate::report::{Case, say};

/// Milliseconds that a checkpoint keeps training waiting, for 100 MB of parameters
///
/// The limit is what a copy of as many bytes takes, from one array of this process to another.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Size of the parameters in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    megabytes: u32,
    /// Seconds of each run, with and without checkpoints
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..))]
    seconds: u64,
    /// Milliseconds that the trainer rests between two steps
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    rest_ms: u64,
}

/// Steps before the clock starts.
const WARM_UP: u64 = 5;

/// The measurements of a run.
struct Seen {
    /// Seconds of all exchanges.
    exchanging: f64,
    steps: u64,
    checkpoints: u64,
}

impl SnapshotArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let (mut values, mut limits) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("snapshot: run {run} of {runs}"));
            limits.push(self.for_100_megabytes(copy(self.megabytes)));
            let without = self.train(None)?;
            let folder = tempfile::tempdir().context("no temporary folder")?;
            let with = self.train(Some(folder.path()))?;
            ensure!(with.checkpoints > 0, "no checkpoint was written in {} s", self.seconds);
            let undisturbed = without.exchanging / without.steps as f64;
            let lost = with.exchanging - undisturbed * with.steps as f64;
            values.push(self.for_100_megabytes(lost / with.checkpoints as f64));
        }
        Ok(vec![Case::new("snapshot", "pause", "ms/100 MB", &values, &limits)])
    }

    fn for_100_megabytes(&self, seconds: f64) -> f64 {
        seconds * 1e3 * 100.0 / f64::from(self.megabytes)
    }

    fn train(&self, folder: Option<&Path>) -> anyhow::Result<Seen> {
        let training = Training {
            consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
            optimizer: Optimizer { momentum: 0.9, ..Optimizer::default() },
            ..Training::default()
        };
        let mut job = Job::new("bench-snapshot", 1, 1, self.megabytes, training)?;
        if let Some(folder) = folder {
            job = job.checkpointed(folder);
        }
        let _servers = job.start()?;
        let mut session = Session::join(job.session(0), &vec![1.0; job.elements])?;
        session.gradients_mut().fill(1e-3);
        for step in 0..WARM_UP {
            session.exchange(step)?;
        }
        let mut seen = Seen { exchanging: 0.0, steps: 0, checkpoints: 0 };
        let (start, mut newest) = (Instant::now(), None);
        while start.elapsed() < Duration::from_secs(self.seconds) {
            thread::sleep(Duration::from_millis(self.rest_ms));
            let exchange = Instant::now();
            session.exchange(WARM_UP + seen.steps)?;
            seen.exchanging += exchange.elapsed().as_secs_f64();
            seen.steps += 1;
            let run = folder.map(|folder| Runs::new(folder).newest()).transpose()?.flatten();
            let kept = run.map(|run| run.complete()).transpose()?.and_then(|kept| kept.last().copied());
            seen.checkpoints += u64::from(kept.is_some() && kept != newest);
            newest = kept;
        }
        session.leave(true, 0, Default::default())?;
        Ok(seen)
    }
}

/// Seconds to copy so many MB.
fn copy(megabytes: u32) -> f64 {
    let from = vec![1_u8; megabytes as usize * 1_000_000];
    let mut to = vec![0_u8; from.len()];
    let start = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    start.elapsed().as_secs_f64()
}
