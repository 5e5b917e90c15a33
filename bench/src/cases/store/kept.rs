//! A job whose state is kept in a bucket, or on a volume: its server is told to stop, and another one goes on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind};
use psjobs_ps::checkpoint::{Folder, Runs};
use psjobs_ps::client::Session;
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use tokio::runtime::Runtime;

use crate::processes::{Job, Process};
use crate::store::Store;

/// The folder in the bucket.
const FOLDER: &str = "bench-store";
/// Seconds between two checkpoints: the first one comes at once, the second one when the server is told to stop.
const INTERVAL: u64 = 100_000;
/// Steps between the first checkpoint and the last one.
const STEPS: u64 = 2;
/// Nothing here takes so long.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Pause between two looks at a server and its store.
const LOOK: Duration = Duration::from_millis(1);

/// A job, and where its state is.
#[derive(Debug)]
pub struct Kept<'a> {
    job: Job,
    folder: Folder,
    /// The store that has the folder, if any.
    store: Option<&'a Store>,
}

/// A server that was told to stop.
#[derive(Clone, Copy, Debug)]
pub struct Stopped {
    /// Seconds from SIGTERM until its checkpoint is complete in the store; none without one.
    pub durable: Option<f64>,
    /// Seconds from SIGTERM to its end.
    pub seconds: f64,
    /// Seconds from the begin of the upload of its part until the object is there; none without a store.
    pub upload: Option<f64>,
    /// The most bytes of resident memory since SIGTERM.
    pub most: u64,
}

impl<'a> Kept<'a> {
    pub fn in_bucket(store: &'a Store, megabytes: u32) -> anyhow::Result<Self> {
        let job = job(megabytes)?.kept_in(&store.url(FOLDER), INTERVAL);
        Ok(Self { job, folder: store.folder(FOLDER)?, store: Some(store) })
    }

    pub fn on_volume(folder: &Path, megabytes: u32) -> anyhow::Result<Self> {
        let job = job(megabytes)?.kept_in(&folder.display().to_string(), INTERVAL);
        Ok(Self { job, folder: folder.into(), store: None })
    }

    fn server(&self) -> anyhow::Result<(Process, String)> {
        let mut command = self.job.command(0, &[])?;
        if let Some(store) = self.store {
            command.envs(store.variables());
        }
        Process::listening(&mut command)
    }

    /// Trains for some steps, ends the server by SIGTERM, and looks at what it does until its end. The trainer has left before, so
    /// that no time is counted in which the server waits for it.
    pub fn stop(&self) -> anyhow::Result<Stopped> {
        let (mut server, address) = self.server()?;
        let mut session = Session::join(self.job.session(0), &vec![1.0; self.job.elements])?;
        session.gradients_mut().fill(1e-3);
        let first = checkpoint_of(&address)?;
        for step in 0..STEPS {
            session.exchange(step)?;
        }
        session.leave(false, 0, Default::default())?;
        let (uploads, parts, manifests) = (self.uploads(), self.parts(), self.manifests());
        // This waits for earlier writes, which would slow it down.
        rustix::fs::sync();
        server.forget_most()?;
        let (mut begun, mut there, mut durable, mut most) = (None, None, None, 0);
        let start = Instant::now();
        server.terminate()?;
        while !server.has_ended()? {
            ensure!(start.elapsed() < TIMEOUT, "the server has not ended {} s after SIGTERM", TIMEOUT.as_secs());
            // One that has just ended has no memory any more.
            if let Ok(resident) = server.resident() {
                most = most.max(resident.most);
            }
            if begun.is_none() && !self.uploads().is_subset(&uploads) {
                begun = Some(Instant::now());
            }
            if there.is_none() && !self.parts().is_subset(&parts) {
                there = Some(Instant::now());
            }
            if durable.is_none() && !self.manifests().is_subset(&manifests) {
                durable = Some(start.elapsed().as_secs_f64());
            }
            thread::sleep(LOOK);
        }
        let seconds = start.elapsed().as_secs_f64();
        let last = newest(&self.folder)?;
        ensure!(
            last.is_some_and(|last| last > first),
            "the newest complete checkpoint is {last:?}, as before SIGTERM; see what the server has said"
        );
        let upload = begun.zip(there).map(|(begun, there)| there.duration_since(begun).as_secs_f64());
        Ok(Stopped { durable, seconds, upload, most })
    }

    /// Returns the seconds from when another server listens until it has the state of the last checkpoint.
    pub fn resume(&self) -> anyhow::Result<f64> {
        rustix::fs::sync();
        let (_server, address) = self.server()?;
        let start = Instant::now();
        checkpoint_of(&address)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the file of the server's part of the newest checkpoint, as the store keeps it.
    pub fn part(&self) -> anyhow::Result<PathBuf> {
        self.parts().pop_last().context("the store has no part of a checkpoint")
    }

    fn uploads(&self) -> BTreeSet<PathBuf> {
        self.store.map(Store::uploads).unwrap_or_default()
    }

    fn manifests(&self) -> BTreeSet<PathBuf> {
        self.store.map(|store| store.manifests(FOLDER)).unwrap_or_default()
    }

    fn parts(&self) -> BTreeSet<PathBuf> {
        self.store.map(|store| store.parts(FOLDER)).unwrap_or_default()
    }
}

/// Returns a job whose state is its parameters and nothing else, so that they are what is sent.
fn job(megabytes: u32) -> anyhow::Result<Job> {
    let training = Training {
        consistency: Consistency { mode: ConsistencyMode::Sync, exact_recovery: Some(false), ..Consistency::default() },
        optimizer: Optimizer { kind: OptimizerKind::Sgd, momentum: 0.0, ..Optimizer::default() },
        ..Training::default()
    };
    Job::new("bench-store", 1, 1, megabytes, training)
}

/// Waits until the server at `address` says that it has a checkpoint, and returns its step.
fn checkpoint_of(address: &str) -> anyhow::Result<u64> {
    let runtime = Runtime::new().context("cannot start a runtime")?;
    let start = Instant::now();
    runtime.block_on(async {
        let client = CoordinationClient::connect(format!("http://{address}")).await;
        let mut client = client.context("cannot ask a server")?;
        loop {
            let status = client.status(StatusRequest {}).await.context("no status")?.into_inner();
            if let Some(newest) = status.checkpoint {
                return Ok(newest.step);
            }
            ensure!(start.elapsed() < TIMEOUT, "there is no checkpoint: {}", status.warnings.join("; "));
            tokio::time::sleep(LOOK).await;
        }
    })
}

/// Returns the step of the newest complete checkpoint in a folder.
fn newest(folder: &Folder) -> anyhow::Result<Option<u64>> {
    let Some(catalog) = Runs::new(folder).newest()? else { return Ok(None) };
    Ok(catalog.complete()?.last().copied())
}
