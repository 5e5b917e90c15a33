//! The state of this server's recovery: its epoch, the newest checkpoint, and the requests that wait for the coordinator.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use psjobs_api::{CheckpointResult, ReplicaResult};
use tokio::sync::{Notify, mpsc, oneshot};
use tonic::Status;

use crate::checkpoint::format::MANIFEST;

/// The newest checkpoint of this job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCheckpoint {
    /// Step that it was taken at.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// When it was complete, in seconds since 1970.
    pub unix_seconds: u64,
}

impl LastCheckpoint {
    /// The one of `step` in `path`, with the time of its manifest, which is written last.
    pub(in crate::server) fn complete(step: u64, path: PathBuf) -> Self {
        let written = std::fs::metadata(path.join(MANIFEST)).and_then(|manifest| manifest.modified());
        let written = written.unwrap_or_else(|_| SystemTime::now());
        let unix_seconds = written.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        Self { step, path, unix_seconds }
    }
}

/// A server that has started and asks to be brought to the others' state.
pub struct Newcomer {
    pub(in crate::server) server: u32,
    pub(in crate::server) instance: u64,
    /// Another server has given it everything that it should hold.
    pub(in crate::server) given: bool,
    pub(in crate::server) done: oneshot::Sender<()>,
}

/// A trainer that has given its last step.
pub struct DurabilityRequest {
    /// Its epoch: the step may be gone in another one.
    pub(in crate::server) epoch: u64,
    pub(in crate::server) kept: oneshot::Sender<()>,
}

/// This server's side of the job's recovery.
pub struct Recovery {
    /// Drawn at random by this process.
    pub(in crate::server) instance: u64,
    /// Restores so far, by the leader's count; 0 before the first.
    epoch: AtomicU64,
    /// Rung when the last checkpoint is written.
    pub(in crate::server) last_written: Notify,
    /// Rung when server 0 says that the trainers are done.
    pub(in crate::server) ended: Notify,
    /// Held while a part goes to disk.
    pub(in crate::server) writing: Arc<tokio::sync::Mutex<()>>,
    newest: Mutex<Option<LastCheckpoint>>,
    /// The model that server 0 has written at the end.
    pub(in crate::server) model: OnceLock<PathBuf>,
    pub(in crate::server) newcomers: mpsc::Sender<Newcomer>,
    arrivals: Mutex<Option<mpsc::Receiver<Newcomer>>>,
    /// Trainers that have given their last step, and wait until a checkpoint has it.
    concluding: mpsc::Sender<DurabilityRequest>,
    conclusions: Mutex<Option<mpsc::Receiver<DurabilityRequest>>>,
}

impl Recovery {
    /// As yet nothing is restored.
    #[must_use]
    pub fn new(servers: u32) -> Self {
        let (newcomers, arrivals) = mpsc::channel(servers as usize + 1);
        // Whoever finds it full waits, as it would for the checkpoint.
        let (concluding, conclusions) = mpsc::channel(16);
        Self {
            instance: rand::random(),
            epoch: AtomicU64::new(0),
            last_written: Notify::new(),
            ended: Notify::new(),
            writing: Arc::default(),
            newest: Mutex::default(),
            model: OnceLock::new(),
            newcomers,
            arrivals: Mutex::new(Some(arrivals)),
            concluding,
            conclusions: Mutex::new(Some(conclusions)),
        }
    }

    /// Restores so far.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// On a server that was given its blocks by another one: it is in that one's epoch.
    pub fn adopt_epoch(&self, epoch: u64) {
        // One that has an epoch of its own was not given its blocks.
        let _ = self.epoch.compare_exchange(0, epoch, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The newest checkpoint, as far as this server knows.
    pub fn newest(&self) -> Option<LastCheckpoint> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Servers that ask to be recovered; for the one task that leads.
    pub(in crate::server) fn arrivals(&self) -> mpsc::Receiver<Newcomer> {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).take();
        arrivals.expect("only one task leads")
    }

    /// What this server leaves behind, besides its members' figures.
    pub fn add_to(&self, result: ReplicaResult) -> ReplicaResult {
        let told = |newest: LastCheckpoint| CheckpointResult {
            step: newest.step,
            path: newest.path.display().to_string(),
            unix_seconds: newest.unix_seconds,
        };
        let model = self.model.get().map(|path| path.display().to_string());
        ReplicaResult { checkpoint: self.newest().map(told), model, ..result }
    }

    /// Trainers that wait for a checkpoint; for the one task that leads.
    pub(in crate::server) fn conclusions(&self) -> mpsc::Receiver<DurabilityRequest> {
        let conclusions = self.conclusions.lock().unwrap_or_else(PoisonError::into_inner).take();
        conclusions.expect("only one task leads")
    }

    pub(in crate::server) fn set_newest(&self, checkpoint: LastCheckpoint) {
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(checkpoint);
    }

    pub(in crate::server) fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Waits until a checkpoint contains the last step of a trainer that joined in `epoch`. On server 0 only.
    ///
    /// # Errors
    /// If the servers restored an earlier checkpoint first.
    pub async fn wait_until_durable(&self, epoch: u64) -> Result<(), Status> {
        let back = || Status::aborted("the servers went to a checkpoint before one had the last step; join again");
        let (kept, answer) = oneshot::channel();
        self.concluding.send(DurabilityRequest { epoch, kept }).await.map_err(|_| back())?;
        answer.await.map_err(|_| back())
    }
}
