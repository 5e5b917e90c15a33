//! Keeps a job's state over the death of its servers. Every server writes its own [`part`] of a
//! checkpoint and goes back to one; server 0 [`lead`]s: it says when to write and to what to go back,
//! so that all servers always hold one state. Without a checkpoint folder none of this runs, and a
//! restarted server is filled from a trainer's parameters.

mod lead;
mod part;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use psjobs_api::{CheckpointResult, Environment, ReplicaResult};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::ServerError;
use super::shared::Shared;
use crate::checkpoint::WriteError;
use crate::checkpoint::format::{MANIFEST, PartEntry};
use crate::clock::now;
use crate::proto;

use lead::lead;

/// How long server 0 may take to ask for the last part.
const LAST: Duration = Duration::from_secs(30);
/// How often a server without trainers looks whether all is done.
const LOOK: Duration = Duration::from_secs(5);

/// Where and how often a job's state is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Folder that all servers of the job share.
    pub folder: PathBuf,
    /// Time between two checkpoints.
    pub interval: Duration,
    /// Complete checkpoints to keep.
    pub keep: usize,
    /// Begin from the newest checkpoint in the folder, if there is one.
    pub resume: bool,
    /// `host:port` of every server, in order.
    pub servers: Vec<String>,
}

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
    fn complete(step: u64, path: PathBuf) -> Self {
        let written = std::fs::metadata(path.join(MANIFEST)).and_then(|manifest| manifest.modified());
        let written = written.unwrap_or_else(|_| SystemTime::now());
        let unix_seconds = written.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        Self { step, path, unix_seconds }
    }
}

/// Why a server could not write or read its part.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The part could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The checkpoint is of another model or optimizer.
    #[error("the checkpoint in {} is of another job: {why}", folder.display())]
    Mismatch {
        /// Its folder.
        folder: PathBuf,
        /// Both sides, and what to do.
        why: String,
    },
    /// The checkpoint is damaged.
    #[error("the checkpoint in {} cannot be used: {why}", folder.display())]
    Unusable {
        /// Its folder.
        folder: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// A block is past the version asked for.
    #[error("this server is past version {0}")]
    Past(u64),
    /// No trainer has told the model, or given its values, yet.
    #[error("there is nothing to keep yet")]
    Empty,
}

/// A server that has started and asks to be brought to the others' state.
pub struct Newcomer {
    server: u32,
    instance: u64,
    /// Another server has given it everything that it should hold.
    given: bool,
    done: oneshot::Sender<()>,
}

/// A trainer that has given its last step.
pub struct Conclusion {
    /// Its epoch: the step may be gone in another one.
    epoch: u64,
    kept: oneshot::Sender<()>,
}

/// This server's side of the job's recovery.
pub struct Recovery {
    /// Drawn at random by this process.
    instance: u64,
    /// Restores so far, by the leader's count; 0 before the first.
    epoch: AtomicU64,
    /// Rung when the last checkpoint is written.
    last_written: Notify,
    /// Rung when server 0 says that the trainers are done.
    ended: Notify,
    /// Held while a part goes to disk.
    writing: Arc<tokio::sync::Mutex<()>>,
    newest: Mutex<Option<LastCheckpoint>>,
    /// The model that server 0 has written at the end.
    model: OnceLock<PathBuf>,
    newcomers: mpsc::Sender<Newcomer>,
    arrivals: Mutex<Option<mpsc::Receiver<Newcomer>>>,
    /// Trainers that have given their last step, and wait until a checkpoint has it.
    concluding: mpsc::Sender<Conclusion>,
    conclusions: Mutex<Option<mpsc::Receiver<Conclusion>>>,
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
    fn arrivals(&self) -> mpsc::Receiver<Newcomer> {
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
    fn conclusions(&self) -> mpsc::Receiver<Conclusion> {
        let conclusions = self.conclusions.lock().unwrap_or_else(PoisonError::into_inner).take();
        conclusions.expect("only one task leads")
    }

    fn set_newest(&self, checkpoint: LastCheckpoint) {
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(checkpoint);
    }
}

impl CheckpointConfig {
    /// The settings in `environment`; `None` if nothing is to be kept.
    #[must_use]
    pub fn new(environment: &Environment) -> Option<Self> {
        let checkpoint = environment.checkpoint.as_ref()?;
        Some(Self {
            folder: checkpoint.folder.clone().into(),
            interval: Duration::from_secs(checkpoint.policy.interval_seconds),
            keep: checkpoint.policy.keep as usize,
            resume: checkpoint.policy.resume,
            servers: environment.servers.clone(),
        })
    }
}

/// This server's part in keeping the job's state, until that of the end of `training` is kept.
///
/// # Errors
/// On server 0, if there is a checkpoint that this job cannot go on from.
pub async fn run(shared: &Arc<Shared>, training: CancellationToken) -> Result<(), ServerError> {
    let Some(config) = &shared.config.checkpoint else { return Ok(()) };
    let given = match &shared.replication {
        Some(replication) => tokio::select! {
            biased;
            given = replication.settled() => given,
            () = training.cancelled() => return Ok(()),
        },
        None => false,
    };
    if shared.config.index == 0 {
        return lead(shared, config, given, training).await;
    }
    let last = shared.recovery.last_written.notified();
    let training_ends = async {
        tokio::select! {
            biased;
            () = training.cancelled() => {}
            () = follow(shared, config, given) => training.cancelled().await,
        }
    };
    tokio::select! {
        biased;
        () = training_ends => {}
        () = shared.recovery.ended.notified(), if !shared.decides_the_end() => {
            shared.done.notify_one();
            return Ok(());
        }
        () = over(shared, config) => {
            tracing::info!("the last checkpoint has every step of every trainer; done");
            shared.done.notify_one();
            return Ok(());
        }
    }
    if tokio::time::timeout(LAST, last).await.is_err() {
        tracing::warn!("server 0 did not ask for the last checkpoint in time; the one before stays the newest");
    }
    Ok(())
}

/// Waits until this server holds what the others do: asks server 0 until it has said so.
async fn follow(shared: &Shared, config: &CheckpointConfig, given: bool) {
    let (recovery, server) = (&shared.recovery, shared.config.index);
    let (job_uid, instance) = (shared.config.job_uid.clone(), recovery.instance);
    let request = proto::RecoverRequest { job_uid, server, instance, given };
    lead::insist("server 0", || async {
        let mut client = lead::client(&shared.config.network, &config.servers[0])?;
        client.recover(request.clone()).await.map(drop)
    })
    .await;
}

/// Waits until the job's last checkpoint is complete and no trainer has been at work for a while, as if there were more
/// to do. So a server learns of the end that was away when it was told.
async fn over(shared: &Shared, config: &CheckpointConfig) {
    let mut quiet = Instant::now();
    loop {
        tokio::time::sleep(LOOK).await;
        if shared.members().active() {
            quiet = Instant::now();
        } else if quiet.elapsed() >= shared.config.patience.silence
            && let Some((steps, trainers)) = part::whole(shared, config).await
        {
            return shared.members().rewind(&steps, &trainers, now());
        }
    }
}

/// Waits until what trainers that have concluded gave survives the loss of servers. Server 0 sees to it.
///
/// # Errors
/// If the servers went back before it was so.
pub async fn conclude(shared: &Shared, epoch: u64) -> Result<(), Status> {
    if shared.config.checkpoint.is_none() || shared.config.index != 0 {
        return Ok(());
    }
    let back = || Status::aborted("the servers went to a checkpoint before one had the last step; join again");
    let (kept, answer) = oneshot::channel();
    shared.recovery.concluding.send(Conclusion { epoch, kept }).await.map_err(|_| back())?;
    answer.await.map_err(|_| back())
}

/// The service.
pub struct Service(pub Arc<Shared>);

#[tonic::async_trait]
impl proto::recovery_server::Recovery for Service {
    async fn recover(&self, request: Request<proto::RecoverRequest>) -> Result<Response<proto::RecoverReply>, Status> {
        let request = request.into_inner();
        self.of_this_job(&request.job_uid)?;
        let (done, answer) = oneshot::channel();
        let newcomer = Newcomer { server: request.server, instance: request.instance, given: request.given, done };
        let leading = || Status::unavailable("this server does not lead yet");
        self.0.recovery.newcomers.send(newcomer).await.map_err(|_| leading())?;
        answer.await.map_err(|_| leading())?;
        Ok(Response::new(proto::RecoverReply {}))
    }

    async fn restore(&self, request: Request<proto::RestoreRequest>) -> Result<Response<proto::RestoreReply>, Status> {
        let request = request.into_inner();
        self.of_this_job(&request.job_uid)?;
        part::restore(&self.0, request.epoch, request.step, &request.concluded).await.map_err(status)?;
        Ok(Response::new(proto::RestoreReply { instance: self.0.recovery.instance }))
    }

    async fn snapshot(
        &self,
        request: Request<proto::SnapshotRequest>,
    ) -> Result<Response<proto::SnapshotReply>, Status> {
        let request = request.into_inner();
        self.of_this_job(&request.job_uid)?;
        if request.epoch != self.0.recovery.epoch() {
            return Err(Status::aborted("this server has gone back to another checkpoint since"));
        }
        if request.last && request.done {
            self.0.recovery.ended.notify_one();
        }
        if request.last {
            self.0.recovery.last_written.notify_one();
            return Ok(Response::new(proto::SnapshotReply::default()));
        }
        let written = part::write(&self.0, request.step, request.version).await.map_err(status)?;
        Ok(Response::new(proto::SnapshotReply {
            part: Some(written.part.into()),
            rows: written.rows.map(proto::CheckpointFile::from),
        }))
    }
}

impl From<PartEntry> for proto::CheckpointFile {
    fn from(PartEntry { file, bytes, crc32 }: PartEntry) -> Self {
        Self { file, bytes, crc32 }
    }
}

impl From<proto::CheckpointFile> for PartEntry {
    fn from(proto::CheckpointFile { file, bytes, crc32 }: proto::CheckpointFile) -> Self {
        Self { file, bytes, crc32 }
    }
}

impl Service {
    fn of_this_job(&self, uid: &str) -> Result<(), Status> {
        let want = &self.0.config.job_uid;
        if uid != want {
            let text = format!("this server belongs to job {want}, the caller to job {uid}; check the addresses");
            return Err(Status::invalid_argument(text));
        }
        if self.0.config.checkpoint.is_none() {
            return Err(Status::failed_precondition(
                "this server has no checkpoint folder, the caller has; start all servers with the same settings",
            ));
        }
        Ok(())
    }
}

fn status(error: RecoveryError) -> Status {
    match error {
        RecoveryError::Past(_) => Status::out_of_range(error.to_string()),
        RecoveryError::Empty => Status::failed_precondition(error.to_string()),
        RecoveryError::Mismatch { .. } => Status::invalid_argument(error.to_string()),
        RecoveryError::Unusable { .. } => Status::data_loss(error.to_string()),
        RecoveryError::Write(_) => Status::internal(error.to_string()),
    }
}
