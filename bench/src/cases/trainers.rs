//! One server for many trainers: steps a second of all together, the server's memory, and what each of a thousand costs it.
//! Trainers are tasks of this process that compute nothing, so that the server is what is measured; all talk TCP.

mod crowd;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind, Staleness, StalenessMomentum};
use psjobs_arithmetic::optimizer;
use psjobs_ps::client::{AsyncSession, SessionConfig};
use psjobs_ps::open_files;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use self::crowd::Crowd;
use crate::processes::{self, Job, alone};
use crate::report::{Case, LeftOut, Line, say};

/// Steps/s of 64 trainers on one server over those of 8, the server's memory, and what each of 1,000 trainers costs it
///
/// `64-server-cpu` and `64-trainers-cpu` are what a step takes of the cores, in the server and in this process with all trainers, over
/// the same of 8 trainers: they say which side is slower with many.
///
/// Cases `memory-*` are in MB: the most that the server had of its own while so many trainers trained, over
/// parameters x (1 + optimizer slots) + 0.5 x parameters. Cases `many-*` are in microseconds for each of --many trainers with a
/// model of 1,000 parameters, over the same of 64: until all have joined, a step in Sync, a status, and, of the server's
/// cores, a second of heartbeats (docs/scaling.md).
#[derive(Debug, Args)]
pub struct TrainersArgs {
    /// Size of the parameters for the steps/s in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Steps of all trainers together, for the steps/s
    #[arg(long, default_value_t = 1280, value_parser = clap::value_parser!(u32).range(64..))]
    steps: u32,
    /// Size of the parameters for the memory in MB
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    memory_megabytes: u32,
    /// Trainers of the cases `many-*`
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(64..=4096))]
    many: u32,
}

const FEW: u32 = 8;
const MANY: u32 = 64;
/// Steps of each trainer before the clock starts: connections grow, memory is touched.
const WARM_UP: u64 = 2;
/// Steps of each trainer while the server's memory is looked at, and how often that is.
const LOOKED_AT: u64 = 8;
const LOOK: Duration = Duration::from_millis(5);

/// The speed of so many trainers, and what a step of one of them costs.
struct Rate {
    /// Steps/s of all together.
    steps: f64,
    /// Milliseconds of a core, in the server and in this process.
    server_ms: f64,
    trainers_ms: f64,
}

/// How the server's memory is looked at.
struct Load {
    case: &'static str,
    trainers: u32,
    mode: ConsistencyMode,
    kind: OptimizerKind,
    momentum: f64,
}

const LOADS: [Load; 5] = [
    Load::new("memory-sgd-1", 1, ConsistencyMode::Async, OptimizerKind::Sgd, 0.0),
    Load::new("memory-momentum-8", 8, ConsistencyMode::Async, OptimizerKind::Sgd, 0.9),
    Load::new("memory-adam-8", 8, ConsistencyMode::Async, OptimizerKind::Adam, 0.0),
    Load::new("memory-sgd-8-sync", 8, ConsistencyMode::Sync, OptimizerKind::Sgd, 0.0),
    Load::new("memory-adam-16-sync", 16, ConsistencyMode::Sync, OptimizerKind::Adam, 0.0),
];

impl Load {
    const fn new(case: &'static str, trainers: u32, mode: ConsistencyMode, kind: OptimizerKind, momentum: f64) -> Self {
        Self { case, trainers, mode, kind, momentum }
    }

    fn training(&self) -> Training {
        let &Self { mode, kind, momentum, .. } = self;
        Training {
            consistency: Consistency { mode, ..Consistency::default() },
            optimizer: Optimizer { kind, momentum, ..Optimizer::default() },
            // The servers' memory is measured, so the momentum is there.
            staleness: Staleness {
                momentum: (momentum > 0.0).then_some(StalenessMomentum::Shared),
                ..Staleness::default()
            },
            ..Training::default()
        }
    }
}

impl TrainersArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let (mut few, mut many) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("trainers: run {run} of {runs}"));
            few.push(self.rate(FEW)?);
            many.push(self.rate(MANY)?);
        }
        let of = |rates: &[Rate], value: fn(&Rate) -> f64| rates.iter().map(value).collect::<Vec<_>>();
        let case = |name, unit, value: fn(&Rate) -> f64| {
            Case::new("trainers", name, unit, &of(&many, value), &of(&few, value))
        };
        let mut cases = vec![
            case("64-trainers", "steps/s", |rate| rate.steps),
            case("64-server-cpu", "ms/step", |rate| rate.server_ms),
            case("64-trainers-cpu", "ms/step", |rate| rate.trainers_ms),
        ];
        for load in &LOADS {
            say(&format!("trainers: {}", load.case));
            let used = (0..runs).map(|_| self.memory(load)).collect::<anyhow::Result<Vec<_>>>()?;
            let slots = optimizer::Optimizer::new(&load.training().optimizer).slots();
            let bound = f64::from(self.memory_megabytes) * (1.5 + slots as f64);
            cases.push(Case::new("trainers", load.case, "MB", &used, &[bound]));
        }
        let mut lines: Vec<Line> = cases.into_iter().map(Line::from).collect();
        lines.extend(self.crowds(runs)?);
        Ok(lines)
    }

    /// Cost of each of many trainers, over each of 64.
    fn crowds(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        // Each trainer takes two files of this process, for its connection and its memory, and a third while it joins.
        let needed = 3 * self.many;
        if open_files::too_few(open_files::raise_limit(), needed).is_some() {
            let why = format!("{} trainers take {needed} open files; `ulimit -Hn` says the most", self.many);
            let left_out = |case| Line::LeftOut(LeftOut { bench: "trainers", case, left_out: why.clone() });
            return Ok(Crowd::CASES.map(left_out).into());
        }
        let (mut few, mut many) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("trainers: {} at once, run {run} of {runs}", self.many));
            few.push(Crowd::measure(MANY)?.each());
            many.push(Crowd::measure(self.many)?.each());
        }
        let of = |crowds: &[[f64; 4]], place: usize| crowds.iter().map(|crowd| crowd[place]).collect::<Vec<_>>();
        let case = |(place, case): (usize, &'static str)| {
            Line::from(Case::new("trainers", case, "us/trainer", &of(&many, place), &of(&few, place)))
        };
        Ok(Crowd::CASES.into_iter().enumerate().map(case).collect())
    }

    /// Steps of all trainers together, Async.
    fn rate(&self, trainers: u32) -> anyhow::Result<Rate> {
        let job = Job::new("bench-trainers", 1, trainers, self.megabytes, Training::default())?;
        let servers = job.start()?;
        let steps = u64::from(self.steps / trainers);
        alone(async {
            let tasks = begin(&job, steps).await?;
            let (start, before, own_before) = (Instant::now(), servers[0].cpu()?, processes::own_cpu()?);
            let ends = end(tasks).await?;
            let (after, own_after) = (servers[0].cpu()?, processes::own_cpu()?);
            let seconds = ends.into_iter().max().unwrap_or(start).duration_since(start).as_secs_f64();
            let all = (steps * u64::from(trainers)) as f64;
            Ok(Rate {
                steps: all / seconds,
                server_ms: 1e3 * (after - before) / all,
                trainers_ms: 1e3 * (own_after - own_before) / all,
            })
        })
    }

    /// The most that the server had while they trained, in MB.
    fn memory(&self, load: &Load) -> anyhow::Result<f64> {
        let job = Job::new("bench-memory", 1, load.trainers, self.memory_megabytes, load.training())?;
        let servers = job.start()?;
        alone(async {
            let tasks = begin(&job, LOOKED_AT).await?;
            tokio::pin! {
                let ended = end(tasks);
            }
            let (mut ticks, mut most) = (interval(LOOK), 0);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    ended = &mut ended => break drop(ended?),
                    _ = ticks.tick() => most = most.max(servers[0].memory().unwrap_or_default()),
                };
            }
            ensure!(most > 0, "the server's memory could not be looked at");
            Ok(most as f64 / 1e6)
        })
    }
}

/// When each trainer was done, at its end.
type Trainers = JoinSet<anyhow::Result<Instant>>;

/// Starts the trainers of `job`; returns when all have warmed up and begin to do `steps`.
async fn begin(job: &Job, steps: u64) -> anyhow::Result<Trainers> {
    let trainers = job.environment.trainers;
    let ready = Arc::new(Barrier::new(trainers as usize + 1));
    let mut tasks = JoinSet::new();
    for index in 0..trainers {
        let (config, ready, elements) = (job.session(index), ready.clone(), job.elements);
        tasks.spawn_local(async move { train(config, elements, steps, &ready).await });
    }
    tokio::select! {
        biased;
        Some(ended) = tasks.join_next() => {
            ended.context("a trainer panicked")??;
            bail!("a trainer ended before it began")
        }
        _ = ready.wait() => Ok(tasks),
    }
}

async fn end(mut tasks: Trainers) -> anyhow::Result<Vec<Instant>> {
    let mut ends = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        ends.push(ended.context("a trainer panicked")??);
    }
    Ok(ends)
}

async fn train(config: SessionConfig, elements: usize, steps: u64, ready: &Barrier) -> anyhow::Result<Instant> {
    let mut session =
        AsyncSession::join(SessionConfig { shared_memory: false, ..config }, &vec![1.0; elements]).await?;
    session.gradients_mut().fill(1e-3);
    for step in 0..WARM_UP {
        session.exchange(step).await?;
    }
    ready.wait().await;
    for step in WARM_UP..WARM_UP + steps {
        session.exchange(step).await?;
    }
    let end = Instant::now();
    session.leave(true, 0, BTreeMap::new()).await?;
    Ok(end)
}
