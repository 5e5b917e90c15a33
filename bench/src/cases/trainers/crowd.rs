//! Cost of each of many trainers to one server that does little else: until all have joined, while they rest and send
//! heartbeats, for a status, and for a step in Sync.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode};
use psjobs_ps::client::{AsyncSession, SessionConfig};
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::processes::{Job, Process, alone};

/// Parameters: one small block.
const ELEMENTS: usize = 1000;
/// How long the trainers only send heartbeats.
const REST: Duration = Duration::from_secs(5);
/// Steps, and statuses, whose mean is taken.
const STEPS: u64 = 5;
/// Longest status of 4,096 trainers.
const LONGEST_STATUS: usize = 64 << 20;

/// The times of so many trainers, in seconds.
#[derive(Debug)]
pub struct Crowd {
    trainers: u32,
    /// Until all had joined.
    join: f64,
    /// One step of all.
    step: f64,
    /// A status, as its caller sees it.
    status: f64,
    /// Share of the server's cores, for a second of heartbeats.
    heartbeats: f64,
}

impl Crowd {
    /// Names of the cases, in the order of [`Crowd::each`].
    pub const CASES: [&'static str; 4] = ["many-join", "many-step", "many-status", "many-heartbeats"];

    /// Returns the times for each trainer, in microseconds.
    pub fn each(&self) -> [f64; 4] {
        [self.join, self.step, self.status, self.heartbeats].map(|seconds| 1e6 * seconds / f64::from(self.trainers))
    }

    /// Measures a job of so many trainers.
    pub fn measure(trainers: u32) -> anyhow::Result<Self> {
        let consistency = Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() };
        let training = Training { consistency, ..Training::default() };
        let mut job = Job::new("bench-crowd", 1, trainers, 1, training)?;
        job.elements = ELEMENTS;
        let (server, address) = Process::listening(&mut job.command(0, &[])?)?;
        alone(async {
            let barrier = Arc::new(Barrier::new(trainers as usize + 1));
            let mut tasks = JoinSet::new();
            let began = Instant::now();
            for index in 0..trainers {
                let (config, barrier) = (job.session(index), barrier.clone());
                tasks.spawn_local(async move { take_part(config, &barrier).await });
            }
            meet(&mut tasks, &barrier).await?;
            let join = began.elapsed().as_secs_f64();

            let (began, before) = (Instant::now(), server.cpu()?);
            tokio::time::sleep(REST).await;
            let heartbeats = (server.cpu()? - before) / began.elapsed().as_secs_f64();

            let client = CoordinationClient::connect(format!("http://{address}")).await;
            let mut client = client.context("the server takes no more connections")?;
            client = client.max_decoding_message_size(LONGEST_STATUS);
            let began = Instant::now();
            for _ in 0..STEPS {
                client.status(StatusRequest {}).await.context("the server does not say how far the job is")?;
            }
            let status = began.elapsed().as_secs_f64() / STEPS as f64;

            meet(&mut tasks, &barrier).await?;
            let began = Instant::now();
            meet(&mut tasks, &barrier).await?;
            let step = began.elapsed().as_secs_f64() / STEPS as f64;
            while let Some(ended) = tasks.join_next().await {
                ended.context("a trainer panicked")??;
            }
            Ok(Self { trainers, join, step, status, heartbeats })
        })
    }
}

/// Waits until all trainers have come to their next barrier.
async fn meet(tasks: &mut JoinSet<anyhow::Result<()>>, barrier: &Barrier) -> anyhow::Result<()> {
    tokio::select! {
        biased;
        Some(ended) = tasks.join_next() => {
            ended.context("a trainer panicked")??;
            bail!("a trainer ended before its time")
        }
        _ = barrier.wait() => Ok(()),
    }
}

/// A trainer that joins, rests, makes its steps and leaves, each when all have come so far.
async fn take_part(config: SessionConfig, barrier: &Barrier) -> anyhow::Result<()> {
    let config = SessionConfig { shared_memory: false, ..config };
    let mut session = AsyncSession::join(config, &[1.0; ELEMENTS]).await?;
    barrier.wait().await;
    session.gradients_mut().fill(1e-3);
    barrier.wait().await;
    for step in 0..STEPS {
        session.exchange(step).await?;
    }
    // The main task reads its clock here, before the first of many leaves.
    barrier.wait().await;
    session.leave(true, 0, BTreeMap::new()).await?;
    Ok(())
}
