//! The cost of metrics over time: steps a second while trainers record them, over those without, and the server's memory.
//! Trainers are tasks of this process that compute nothing, so that the servers have most of the machine.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use psjobs_api::Training;
use psjobs_ps::checkpoint::Folder;
use psjobs_ps::client::{AsyncSession, SessionConfig};
use psjobs_ps::series::writer::read_points;
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};

use crate::processes::Job;
use crate::report::{Case, say};

/// Steps/s of trainers that record metrics over those that record none, and the server's memory for them
///
/// The limit of `steps` is the same job whose trainers record nothing; `memory` is in MiB, how much more of its own the
/// server had at the end, over 32.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Points a second of all trainers together
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    points: u32,
    /// Trainers
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    trainers: u32,
    /// Size of the parameters in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
}

/// Memory for metrics at most, in MiB.
const MEMORY: f64 = 32.0;
/// Metrics of one trainer; each step has values for some of them.
const METRICS: u64 = 32;
/// Steps before the clock starts: connections grow, memory is touched.
const WARM_UP: u64 = 10;

impl MetricsArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let [mut with, mut without, mut memory] = [const { Vec::new() }; 3];
        for run in 1..=runs {
            say(&format!("metrics: run {run} of {runs}"));
            let (plain, least) = self.steps_and_memory(0)?;
            let (recorded, most) = self.steps_and_memory(self.points)?;
            without.push(plain);
            with.push(recorded);
            memory.push(most.saturating_sub(least) as f64 / f64::from(1 << 20));
        }
        Ok(vec![
            Case::new("metrics", "steps", "steps/s", &with, &without),
            Case::new("metrics", "memory", "MiB", &memory, &[MEMORY]),
        ])
    }

    /// Steps/s of all trainers together while they record so many points a second, and the bytes of the server at the end.
    fn steps_and_memory(&self, points: u32) -> anyhow::Result<(f64, u64)> {
        let folder = tempfile::tempdir().context("cannot make a folder for metrics")?;
        let mut job = Job::new("bench-metrics", 1, self.trainers, self.megabytes, Training::default())?;
        job.environment.metrics_folder = Some(folder.path().display().to_string());
        let servers = job.start()?;
        let (length, rate) = (Duration::from_secs(self.seconds), f64::from(points) / f64::from(self.trainers));
        let runtime = Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
        let (steps, recorded, memory) = LocalSet::new().block_on(&runtime, async {
            let mut tasks = JoinSet::new();
            for index in 0..self.trainers {
                tasks.spawn_local(train(job.session(index), job.elements, length, rate));
            }
            let mut trained = Vec::new();
            while let Some(ended) = tasks.join_next().await {
                trained.push(ended.context("a trainer panicked")??);
            }
            let memory = servers[0].memory()?;
            let (mut steps, mut recorded) = (0.0, 0);
            for Trained { session, steps_per_second, points } in trained {
                session.leave(true, 0, BTreeMap::new()).await?;
                (steps, recorded) = (steps + steps_per_second, recorded + points);
            }
            anyhow::Ok((steps, recorded, memory))
        })?;
        for mut server in servers {
            server.wait()?;
        }
        let mut kept = 0;
        for index in 0..self.trainers {
            let series = Folder::from(folder.path().join(format!("trainer-{index}")));
            kept += read_points(&series)?.iter().map(|point| point.values.len() as u64).sum::<u64>();
        }
        ensure!(kept == recorded, "of {recorded} points that were recorded {kept} are in the files");
        Ok((steps, memory))
    }
}

/// A trainer that is done and has not left.
struct Trained {
    session: AsyncSession,
    steps_per_second: f64,
    points: u64,
}

/// Trains for `length`, and records `rate` points a second.
async fn train(config: SessionConfig, elements: usize, length: Duration, rate: f64) -> anyhow::Result<Trained> {
    let config = SessionConfig { shared_memory: false, total_steps: SessionConfig::UNKNOWN_STEPS, ..config };
    let mut session = AsyncSession::join(config, &vec![1.0; elements]).await?;
    session.gradients_mut().fill(1e-3);
    let names: Vec<String> = (0..METRICS).map(|metric| format!("metric-{metric}")).collect();
    for step in 0..WARM_UP {
        session.exchange(step).await?;
    }
    let (recorder, start) = (session.recorder(), Instant::now());
    let (mut step, mut points) = (WARM_UP, 0);
    while start.elapsed() < length {
        step = session.exchange(step).await?;
        let owed = (start.elapsed().as_secs_f64() * rate) as u64 - points;
        let values: BTreeMap<_, _> =
            names.iter().take(owed.min(METRICS) as usize).map(|name| (name.clone(), step as f64)).collect();
        if !values.is_empty() {
            recorder.record(step, &values);
        }
        points += values.len() as u64;
    }
    let steps_per_second = (step - WARM_UP) as f64 / start.elapsed().as_secs_f64();
    Ok(Trained { session, steps_per_second, points })
}
