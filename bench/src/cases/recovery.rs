//! How long training stands still when a server is killed: with a second server that holds its blocks, and
//! from a checkpoint. The servers are processes of this program.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind};
use psjobs_ps::checkpoint::{CheckpointId, Runs};
use psjobs_ps::client::Session;
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use tokio::runtime::Runtime;

use crate::processes::{Job, Process};
use crate::report::{Case, median, say};

/// Seconds until training goes on after kill -9 of a server
#[derive(Debug, Args)]
pub struct RecoveryArgs {
    /// Size of the parameters for `replica` in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Size of the parameters for `checkpoint` in MB
    #[arg(long, value_name = "MB", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    checkpoint_megabytes: u32,
}

/// A run's figure and its limit.
type Measure<'a> = &'a dyn Fn(u32) -> anyhow::Result<(f64, f64)>;

/// Steps before the servers are killed, and after.
const BEFORE: u64 = 10;
const AFTER: u64 = 20;
/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(120);
/// A power of two, as is the learning rate: so the parameters that must result are known exactly.
const GRADIENT: f32 = 0.25;

impl RecoveryArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let cases: [(_, Measure); 2] = [
            // Alternately the server that knows the job, and the other one.
            ("replica", &|run| replica(self.megabytes, (run % 2) as usize)),
            ("checkpoint", &|_| checkpoint(self.checkpoint_megabytes)),
        ];
        let measured = cases.into_iter().map(|(case, measure)| {
            let (mut values, mut limits) = (Vec::new(), Vec::new());
            for run in 1..=runs {
                say(&format!("recovery {case}: run {run} of {runs}"));
                let (value, limit) = measure(run)?;
                values.push(value);
                limits.push(limit);
            }
            Ok(Case::new("recovery", case, "s", &values, &limits))
        });
        measured.collect()
    }
}

/// Seconds from the kill of one of two replicated servers to the next step done, and of an undisturbed step.
fn replica(megabytes: u32, victim: usize) -> anyhow::Result<(f64, f64)> {
    let mut job = Running::start(2, megabytes, None)?;
    let mut session = job.join()?;
    job.steps(&mut session, 0, BEFORE)?;
    job.wait_for_copies(1 - victim)?;
    let undisturbed = job.steps(&mut session, BEFORE, 2 * BEFORE)?;
    job.servers[victim].kill()?;
    let disturbed = job.steps(&mut session, 2 * BEFORE, 2 * BEFORE + 1)?;
    job.steps(&mut session, 2 * BEFORE + 1, 2 * BEFORE + AFTER)?;
    job.check(&session, 2 * BEFORE + AFTER)?;
    session.leave(true, 0, Default::default())?;
    Ok((disturbed[0], median(&undisturbed)))
}

/// Returns the newest complete checkpoint of the newest run in a folder.
fn newest(folder: &Path) -> anyhow::Result<Option<CheckpointId>> {
    let runs = Runs::new(folder);
    let Some(run) = runs.list()?.last().map(|record| record.run) else { return Ok(None) };
    let newest = runs.catalog(run).complete()?.last().copied();
    Ok(newest.map(|step| CheckpointId { run, step }))
}

/// Seconds from the start of a server's successor to the next step done, and of reading as many bytes.
fn checkpoint(megabytes: u32) -> anyhow::Result<(f64, f64)> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let mut job = Running::start(1, megabytes, Some(folder.path()))?;
    let mut session = job.join()?;
    let mut step = 0;
    let started = Instant::now();
    let kept = loop {
        job.steps(&mut session, step, step + 1)?;
        step = session.next_step();
        if let Some(kept) = newest(folder.path())? {
            break kept;
        }
        ensure!(started.elapsed() < PATIENCE, "no checkpoint was written");
    };
    let part = Runs::new(folder.path()).path(kept).join("ps-00000-of-00001.safetensors");
    let reading = Instant::now();
    let bytes = std::fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?.len();
    let limit = reading.elapsed().as_secs_f64();
    ensure!(bytes >= megabytes as usize * 1_000_000, "the checkpoint holds {bytes} bytes only");
    job.servers[0].kill()?;
    let start = Instant::now();
    job.servers[0] = job.job.server(0)?;
    let until = session.next_step() + 2;
    // Back at the checkpoint, then a step.
    let at = session.exchange(session.next_step())?;
    session.exchange(at)?;
    let seconds = start.elapsed().as_secs_f64();
    job.steps(&mut session, at + 1, until)?;
    job.check(&session, until)?;
    session.leave(true, 0, Default::default())?;
    Ok((seconds, limit))
}

struct Running {
    job: Job,
    servers: Vec<Process>,
    runtime: Runtime,
}

impl Running {
    fn start(servers: u32, megabytes: u32, folder: Option<&Path>) -> anyhow::Result<Self> {
        let training = Training {
            consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
            optimizer: Optimizer {
                kind: OptimizerKind::Sgd,
                learning_rate: 0.0625,
                momentum: 0.0,
                ..Optimizer::default()
            },
            ..Training::default()
        };
        let mut job = Job::new("bench-recovery", servers, 1, megabytes, training)?;
        job.environment.replication_factor = servers;
        if let Some(folder) = folder {
            job = job.checkpointed(folder);
        }
        let runtime = Runtime::new().context("cannot start a runtime")?;
        Ok(Self { servers: job.start()?, job, runtime })
    }

    fn join(&self) -> anyhow::Result<Session> {
        let mut session = Session::join(self.job.session(0), &vec![1.0; self.job.elements])?;
        session.gradients_mut().fill(GRADIENT);
        Ok(session)
    }

    /// Does the steps from `first` to before `until`; the seconds of each.
    fn steps(&self, session: &mut Session, first: u64, until: u64) -> anyhow::Result<Vec<f64>> {
        let step = |step| {
            let start = Instant::now();
            let next = session.exchange(step)?;
            ensure!(next == step + 1, "training went back to step {next} after step {step}");
            Ok(start.elapsed().as_secs_f64())
        };
        (first..until).map(step).collect()
    }

    /// Waits until all blocks are held twice, by what `server` says.
    fn wait_for_copies(&self, server: usize) -> anyhow::Result<()> {
        let address = format!("http://{}", self.job.environment.servers[server]);
        let start = Instant::now();
        self.runtime.block_on(async {
            let mut client = CoordinationClient::connect(address).await.context("cannot ask a server")?;
            while start.elapsed() < PATIENCE {
                let warnings = client.status(StatusRequest {}).await.context("no status")?.into_inner().warnings;
                if warnings.is_empty() {
                    return Ok(());
                }
                tokio::task::yield_now().await;
            }
            bail!("the blocks were not copied")
        })
    }

    /// That every parameter is what `steps` steps make of it, no more and no fewer.
    fn check(&self, session: &Session, steps: u64) -> anyhow::Result<()> {
        let want = (0..steps).fold(1.0_f32, |value, _| value - 0.0625 * GRADIENT);
        let wrong = session.parameters().iter().find(|value| **value != want);
        ensure!(wrong.is_none(), "after {steps} steps parameters are {wrong:?}, expected {want}");
        Ok(())
    }
}
