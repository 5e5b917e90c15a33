//! The state of this server's recovery: its epoch, the newest checkpoint, and the requests that wait for the coordinator.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use psjobs_api::{CheckpointResult, ReplicaResult};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tonic::Status;

use super::failed_write::FailedWrite;
use crate::checkpoint::format::MANIFEST;
use crate::checkpoint::{CheckpointId, Folder};

/// Interval at which the wait for a checkpoint looks whether the servers have gone to another one.
const LOOK: Duration = Duration::from_secs(1);

/// The newest checkpoint of this job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCheckpoint {
    /// Its run, and the step that it was taken at.
    pub id: CheckpointId,
    /// Its folder.
    pub path: Folder,
    /// The time when it was completed, in seconds since 1970, by the clock of the disk. It is shown and never compared.
    pub unix_seconds: u64,
}

impl LastCheckpoint {
    /// Describes the checkpoint `id` in `path`. Its time is that of its manifest, which is written last.
    pub(in crate::server) fn complete(id: CheckpointId, path: Folder) -> Self {
        let written = path.disk().modified(&path.join(MANIFEST)).unwrap_or_else(|_| path.disk().now());
        let unix_seconds = written.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        Self { id, path, unix_seconds }
    }
}

/// A server that has started and asks to be restored to the state of the others.
pub struct Newcomer {
    pub(in crate::server) server: u32,
    pub(in crate::server) instance: u64,
    /// Another server has already sent it all blocks that it should hold.
    pub(in crate::server) given: bool,
    /// The epoch of its state, if that is whole; else 0.
    pub(in crate::server) epoch: u64,
    pub(in crate::server) done: oneshot::Sender<()>,
}

/// The request of a trainer that waits until its last step is in a checkpoint.
pub struct DurabilityRequest {
    /// The epoch of the step; a restore may have discarded it.
    pub(in crate::server) epoch: u64,
    /// Receives the reason if the step cannot be kept.
    pub(in crate::server) kept: oneshot::Sender<Result<(), NotKept>>,
}

/// Says why the last step of a trainer is in no checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotKept {
    /// The fault, and what to do about it.
    pub(in crate::server) why: String,
    /// The server has given up; otherwise it tries again.
    pub(in crate::server) given_up: bool,
}

/// The recovery state of this server.
pub struct Recovery {
    /// Drawn at random by this process.
    pub(in crate::server) instance: u64,
    /// The epoch of the last restore; 0 before the first and during one.
    epoch: AtomicU64,
    /// The epoch in which this server takes no more gradients; 0 if there is none.
    held: AtomicU64,
    /// Set until this server has all its state: from a checkpoint, or from the servers that hold the other copies.
    awaits_restore: AtomicBool,
    /// Notified when this server has all its state.
    whole: Notify,
    /// Set if this process was given its state by the servers that hold the other copies.
    has_taken_over: AtomicBool,
    /// The greatest epoch that server 0 has asked for.
    asked: AtomicU64,
    /// The run of the job; 0 before it is known.
    run: AtomicU32,
    /// How often server 0 was replaced before its newest process that has asked for something.
    leader: AtomicU32,
    /// A fault of the checkpoint folder that this server waits for, for the status.
    trouble: Mutex<Option<String>>,
    /// Set while checkpoints cannot be written. On server 0 only.
    failed_write: Mutex<Option<FailedWrite>>,
    /// Held while a checkpoint is loaded, so that one is loaded after the other.
    pub(in crate::server) loading: tokio::sync::Mutex<()>,
    /// Set when server 0 says that it writes no more checkpoints. A later process of it may write some after all, and
    /// takes it back.
    pub(in crate::server) last_written: watch::Sender<bool>,
    /// Notified when server 0 reports that the trainers are done.
    pub(in crate::server) ended: Notify,
    /// Held while a part is written to disk.
    pub(in crate::server) writing: Arc<tokio::sync::Mutex<()>>,
    /// Read-locked while server 0 waits for a part that is being written here.
    pub(in crate::server) awaited: tokio::sync::RwLock<()>,
    newest: Mutex<Option<LastCheckpoint>>,
    /// The model that server 0 exports at the end.
    pub(in crate::server) model: OnceLock<PathBuf>,
    pub(in crate::server) newcomers: mpsc::Sender<Newcomer>,
    arrivals: Mutex<Option<mpsc::Receiver<Newcomer>>>,
    /// Trainers that wait until their last step is in a checkpoint.
    concluding: mpsc::Sender<DurabilityRequest>,
    conclusions: Mutex<Option<mpsc::Receiver<DurabilityRequest>>>,
}

impl Recovery {
    /// Creates the state of a server that has not restored anything.
    #[must_use]
    pub fn new(servers: u32) -> Self {
        let (newcomers, arrivals) = mpsc::channel(servers as usize + 1);
        // A sender that finds it full waits, as it would for the checkpoint.
        let (concluding, conclusions) = mpsc::channel(16);
        Self {
            instance: rand::random(),
            epoch: AtomicU64::new(0),
            held: AtomicU64::new(0),
            awaits_restore: AtomicBool::new(true),
            whole: Notify::new(),
            has_taken_over: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            run: AtomicU32::new(0),
            leader: AtomicU32::new(0),
            trouble: Mutex::default(),
            failed_write: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
            last_written: watch::Sender::new(false),
            ended: Notify::new(),
            writing: Arc::default(),
            awaited: tokio::sync::RwLock::default(),
            newest: Mutex::default(),
            model: OnceLock::new(),
            newcomers,
            arrivals: Mutex::new(Some(arrivals)),
            concluding,
            conclusions: Mutex::new(Some(conclusions)),
        }
    }

    /// Returns the epoch of the last restore.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Returns the greatest epoch that this server has heard of.
    pub fn greatest_epoch(&self) -> u64 {
        self.asked.load(Ordering::Acquire).max(self.epoch())
    }

    /// Returns whether this server is on its way to a checkpoint: its blocks and rows are of different states.
    pub fn is_restoring(&self) -> bool {
        self.asked.load(Ordering::Acquire) > self.epoch()
    }

    /// Records that server 0 asks for a restore in `epoch`; the greater one that it has asked for before, if so.
    pub(in crate::server) fn ask_for(&self, epoch: u64) -> Result<(), u64> {
        let greatest = self.asked.fetch_max(epoch, Ordering::AcqRel).max(self.epoch());
        if greatest > epoch { Err(greatest) } else { Ok(()) }
    }

    /// Returns the epoch of this server's state, if that is whole.
    pub(in crate::server) fn whole_epoch(&self) -> Option<u64> {
        let is_whole = !self.awaits_restore() && !self.is_restoring();
        Some(self.epoch()).filter(|epoch| is_whole && *epoch > 0)
    }

    /// Records that the process of server 0 that has this incarnation asks for something; the incarnation of the later one
    /// that has asked before, if so.
    pub(in crate::server) fn hear_leader(&self, incarnation: u32) -> Result<(), u32> {
        let newest = self.leader.fetch_max(incarnation, Ordering::AcqRel);
        if newest > incarnation { Err(newest) } else { Ok(()) }
    }

    /// Returns the run of the job, if it is known.
    pub fn run(&self) -> Option<u32> {
        Some(self.run.load(Ordering::Acquire)).filter(|run| *run > 0)
    }

    pub(in crate::server) fn set_run(&self, run: u32) {
        self.run.store(run, Ordering::Release);
    }

    /// Returns the fault of the checkpoint folder that this server waits for, if any.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    pub(in crate::server) fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock() = trouble;
    }

    /// Returns why checkpoints cannot be written and since when, if so. On server 0 only.
    pub fn failed_write(&self) -> Option<FailedWrite> {
        self.failed_write.lock().clone()
    }

    /// Records that a checkpoint could not be written because of `why`, at the time `at` of the disk.
    pub(in crate::server) fn write_failed(&self, why: &str, at: SystemTime) {
        let unix_seconds = at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let mut failed = self.failed_write.lock();
        *failed = Some(FailedWrite::after(failed.take(), why, unix_seconds));
    }

    /// Records that a checkpoint was written.
    pub(in crate::server) fn write_succeeded(&self) {
        *self.failed_write.lock() = None;
    }

    /// Takes over the epoch of a server that sends this one its blocks. Returns whether this server is in that epoch: one
    /// that was sent blocks of another epoch before, or is being restored, cannot be given all its state.
    pub fn adopt_epoch(&self, epoch: u64) -> bool {
        if self.asked.load(Ordering::Acquire) > epoch {
            return false;
        }
        // One that has an epoch of its own was not given its blocks.
        let adopted = self.epoch.compare_exchange(0, epoch, Ordering::AcqRel, Ordering::Acquire);
        adopted.is_ok() || adopted == Err(epoch)
    }

    /// Returns the newest checkpoint that this server knows.
    pub fn newest(&self) -> Option<LastCheckpoint> {
        self.newest.lock().clone()
    }

    /// Returns the queue of servers that ask to be restored. Only the coordinator calls it, once.
    pub(in crate::server) fn arrivals(&self) -> mpsc::Receiver<Newcomer> {
        let arrivals = self.arrivals.lock().take();
        arrivals.expect("only one task leads")
    }

    /// Adds the newest checkpoint and the exported model to the result of a server.
    pub fn add_to(&self, result: ReplicaResult) -> ReplicaResult {
        let described = |newest: LastCheckpoint| CheckpointResult {
            step: newest.id.step,
            path: newest.path.display().to_string(),
            unix_seconds: newest.unix_seconds,
        };
        let model = self.model.get().map(|path| path.display().to_string());
        ReplicaResult { checkpoint: self.newest().map(described), model, ..result }
    }

    /// Returns the queue of trainers that wait for a checkpoint. Only the coordinator calls it, once.
    pub(in crate::server) fn conclusions(&self) -> mpsc::Receiver<DurabilityRequest> {
        let conclusions = self.conclusions.lock().take();
        conclusions.expect("only one task leads")
    }

    pub(in crate::server) fn set_newest(&self, checkpoint: LastCheckpoint) {
        *self.newest.lock() = Some(checkpoint);
    }

    /// Returns whether this server was neither restored nor given its state by the servers that hold the other copies.
    pub fn awaits_restore(&self) -> bool {
        self.awaits_restore.load(Ordering::Acquire)
    }

    /// Records that this server has the state of the others.
    pub(in crate::server) fn set_whole(&self) {
        self.awaits_restore.store(false, Ordering::Release);
        self.whole.notify_waiters();
    }

    /// Waits until this server has an epoch, and the state of it from a checkpoint or from the other holders.
    pub(in crate::server) async fn wait_until_whole(&self) {
        loop {
            let whole = self.whole.notified();
            if self.epoch() > 0 && !self.awaits_restore() {
                return;
            }
            whole.await;
        }
    }

    /// Records that this server was given its state by the servers that hold the other copies.
    pub(in crate::server) fn set_taken_over(&self) {
        self.has_taken_over.store(true, Ordering::Release);
        self.set_whole();
    }

    /// Records that this process goes to a checkpoint, although it was given its state.
    pub(in crate::server) fn give_up_takeover(&self) {
        self.has_taken_over.store(false, Ordering::Release);
    }

    /// Returns whether this process was given its state by the servers that hold the other copies.
    pub(in crate::server) fn has_taken_over(&self) -> bool {
        self.has_taken_over.load(Ordering::Acquire)
    }

    pub(in crate::server) fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Records that this server takes no more gradients in `epoch`: it is going to be restored.
    pub(in crate::server) fn hold(&self, epoch: u64) {
        self.held.store(epoch, Ordering::Release);
    }

    /// Returns whether this server takes no more gradients before it is restored.
    pub(in crate::server) fn is_held(&self) -> bool {
        let held = self.held.load(Ordering::Acquire);
        held > 0 && held == self.epoch()
    }

    /// Waits until a checkpoint contains the last step of a trainer that joined in `epoch`. On server 0 only.
    ///
    /// # Errors
    /// If the servers restored an earlier checkpoint first, or the step cannot be kept.
    pub async fn wait_until_durable(&self, epoch: u64) -> Result<(), Status> {
        let back = || Status::aborted("the servers went to a checkpoint before one had the last step; join again");
        let asked = async {
            let (kept, answer) = oneshot::channel();
            self.concluding.send(DurabilityRequest { epoch, kept }).await.map_err(|_| back())?;
            answer.await.map_err(|_| back())?.map_err(|NotKept { why, given_up }| {
                if given_up { Status::failed_precondition(why) } else { Status::internal(why) }
            })
        };
        tokio::pin!(asked);
        loop {
            match tokio::time::timeout(LOOK, &mut asked).await {
                Ok(answer) => return answer,
                // The coordinator does not answer while it restores, for as long as a server is away.
                Err(_) if self.epoch() != epoch => return Err(back()),
                Err(_) => {}
            }
        }
    }
}
