//! A job whose server is going to be lost: its servers, and steps of its one trainer, which is this process.

use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind};
use psjobs_ps::client::{Session, SessionConfig};
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use tokio::runtime::Runtime;

use super::TIMEOUT;
use crate::processes::{Job, Process};

/// A power of two, as is the learning rate: so the parameters that must result are known exactly.
const GRADIENT: f32 = 0.25;
const LEARNING_RATE: f32 = 0.0625;

/// Returns a job with servers at these addresses, of which two hold each block if there are two.
pub fn job(servers: Vec<String>, megabytes: u32) -> Job {
    let training = Training {
        consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
        optimizer: Optimizer {
            kind: OptimizerKind::Sgd,
            learning_rate: LEARNING_RATE.into(),
            momentum: 0.0,
            ..Optimizer::default()
        },
        ..Training::default()
    };
    let copies = servers.len() as u32;
    let mut job = Job::at("bench-recovery", servers, 1, megabytes, training);
    job.environment.replication_factor = copies;
    job
}

/// A job that runs.
pub struct Running {
    pub job: Job,
    pub servers: Vec<Process>,
    runtime: Runtime,
}

impl Running {
    /// The job with its servers, which have been started.
    pub fn new(job: Job, servers: Vec<Process>) -> anyhow::Result<Self> {
        Ok(Self { job, servers, runtime: Runtime::new().context("cannot start a runtime")? })
    }

    pub fn join(&self, config: SessionConfig) -> anyhow::Result<Session> {
        let mut session = Session::join(config, &vec![1.0; self.job.elements])?;
        session.gradients_mut().fill(GRADIENT);
        Ok(session)
    }

    /// Does the steps from `first` to before `until`; the seconds of each.
    pub fn steps(&self, session: &mut Session, first: u64, until: u64) -> anyhow::Result<Vec<f64>> {
        let step = |step| {
            let start = Instant::now();
            let next = session.exchange(step)?;
            ensure!(next == step + 1, "training went back to step {next} after step {step}");
            Ok(start.elapsed().as_secs_f64())
        };
        (first..until).map(step).collect()
    }

    /// Waits until all blocks are held twice, by what the server at `address` says.
    pub fn wait_for_copies(&self, address: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        self.runtime.block_on(async {
            let mut client =
                CoordinationClient::connect(format!("http://{address}")).await.context("cannot ask a server")?;
            while start.elapsed() < TIMEOUT {
                let warnings = client.status(StatusRequest {}).await.context("no status")?.into_inner().warnings;
                if warnings.is_empty() {
                    return Ok(());
                }
                tokio::task::yield_now().await;
            }
            bail!("the blocks were not copied")
        })
    }

    /// Ends training after `steps` steps. Every parameter must be what they make of it, no more and no fewer.
    pub fn finish(&self, session: Session, steps: u64) -> anyhow::Result<()> {
        let want = (0..steps).fold(1.0_f32, |value, _| value - LEARNING_RATE * GRADIENT);
        let wrong = session.parameters().iter().find(|value| **value != want);
        ensure!(wrong.is_none(), "after {steps} steps parameters are {wrong:?}, expected {want}");
        session.leave(true, 0, Default::default())?;
        Ok(())
    }
}
