//! Holds the lock of the checkpoint folder for server 0: takes it, renews it while the job runs, and removes it at the
//! end.

use std::io;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::folder::{FolderError, insist};
use crate::checkpoint::lock::{Claim, Lock, LockFile, claim, is_held};
use crate::checkpoint::runs::BY_HAND;
use crate::checkpoint::{Disk, Folder, WriteError};
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;

/// Interval of renewals.
const RENEWAL: Duration = Duration::from_secs(5);

/// Pause between two attempts to read the lock.
const PAUSE: Duration = Duration::from_millis(200);

/// The lock of the folder, held by this process, for as long as server 0 works there.
pub(super) struct FolderLock<'a> {
    config: &'a CheckpointConfig,
    holder: Holder,
}

/// This process as the lock names it, and where to look whether another one has taken its place.
#[derive(Clone)]
pub(super) struct Holder {
    file: LockFile,
    own: Lock,
    /// The one in whose place it was taken.
    before: Option<Lock>,
    /// The newest mark that counts for nothing: jobs by hand count from 0 again.
    found: u32,
    folder: Folder,
}

impl<'a> FolderLock<'a> {
    /// Takes the lock, after waiting for a stale one of another job.
    ///
    /// # Errors
    /// If another job holds it.
    pub async fn take(state: &ServerState, config: &'a CheckpointConfig) -> Result<Self, ServerError> {
        let file = LockFile::new(&config.folder);
        let (job, uid, holder) = (config.job.clone(), state.config.job_uid.clone(), state.recovery.instance);
        let own = Lock { job, uid, holder, incarnation: config.incarnation, counter: 0 };
        let (mut first, mut waited) = (None, 0);
        let before = loop {
            let reading = file.clone();
            let found = insist(state, &config.folder, move || reading.read().map_err(unreadable)).await?;
            if waited == 0 {
                first.clone_from(&found);
            }
            match (claim(&own.uid, first.as_ref(), found.as_ref(), waited), &found) {
                (Claim::Take, _) => break found,
                (Claim::Refused, Some(lock)) => {
                    let Lock { job, uid, .. } = lock.clone();
                    return Err(ServerError::FolderInUse { job, uid, folder: config.folder.display().to_string() });
                }
                (Claim::Wait | Claim::Refused, _) => {
                    if let Some(Lock { job, uid, .. }) = &found {
                        tracing::info!(
                            job,
                            uid,
                            "the checkpoint folder is locked; waiting to see if that job is alive"
                        );
                    }
                    waited += 1;
                    sleep(RENEWAL).await;
                }
            }
        };
        let marks = file.clone();
        let found = match own.uid.as_str() {
            BY_HAND => insist(state, &config.folder, move || marks.newest_mark().map_err(unreadable)).await?,
            _ => 0,
        };
        let holder = Holder { file, own, before, found, folder: config.folder.clone() };
        holder.confirm().await?;
        if holder.own.incarnation > 0 {
            let Holder { file, own, .. } = holder.clone();
            insist(state, &config.folder, move || Ok(file.mark(&own)?)).await?;
        }
        let lock = Self { config, holder };
        if let Err(error) = lock.write(0).await {
            // It is written at a renewal.
            tracing::warn!(%error, "the lock of the checkpoint folder could not be written");
        }
        Ok(lock)
    }

    /// Renews the lock; resolves when another process has taken it.
    pub async fn renew(&self) -> ServerError {
        let mut renewals = interval(RENEWAL);
        renewals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for counter in 1_u64.. {
            renewals.tick().await;
            if let Err(taken) = self.check().await {
                return taken;
            }
            if let Err(error) = self.write(counter).await {
                tracing::warn!(%error, "the lock of the checkpoint folder could not be renewed");
            }
        }
        ServerError::Stopped
    }

    /// Checks that no other process has taken the lock. A lock that cannot be read now counts as held.
    ///
    /// # Errors
    /// If another one has.
    pub async fn check(&self) -> Result<(), ServerError> {
        self.holder.read().await.unwrap_or(Ok(()))
    }

    /// As [`FolderLock::check`], before a checkpoint is written: none can be completed while the lock cannot be read.
    ///
    /// # Errors
    /// If it cannot be read; the inner error says that another process has taken it.
    pub async fn read(&self) -> Result<Result<(), ServerError>, String> {
        self.holder.read().await.map_err(|error| lock_is_unreadable(&error))
    }

    /// Returns what shows whether this process has the lock, for a task of its own.
    pub fn holder(&self) -> Holder {
        self.holder.clone()
    }

    /// Removes the lock, if it is still held.
    pub async fn release(&self) {
        let Holder { file, own, .. } = self.holder.clone();
        if let Err(error) = self.disk().work(move || file.release(&own)).await {
            tracing::warn!(%error, "the lock of the checkpoint folder could not be removed; another job waits for it");
        }
    }

    fn disk(&self) -> &Disk {
        self.config.folder.disk()
    }

    async fn write(&self, counter: u64) -> Result<(), WriteError> {
        let (file, lock) = (self.holder.file.clone(), Lock { counter, ..self.holder.own.clone() });
        self.disk().work(move || file.write(&lock)).await
    }
}

fn unreadable(error: io::Error) -> FolderError {
    FolderError::Wait(lock_is_unreadable(&error))
}

fn lock_is_unreadable(error: &io::Error) -> String {
    format!("cannot read the lock of the checkpoint folder: {error}")
}

impl Holder {
    /// Checks that no other process has taken the lock, and waits while it cannot be read.
    ///
    /// # Errors
    /// If another one has.
    pub async fn confirm(&self) -> Result<(), ServerError> {
        loop {
            match self.read().await {
                Ok(held) => return held,
                Err(error) => tracing::debug!(%error, "the lock of the checkpoint folder cannot be read"),
            }
            sleep(PAUSE).await;
        }
    }

    /// Reads the lock; the inner error says that another process has taken it.
    async fn read(&self) -> io::Result<Result<(), ServerError>> {
        let Self { file, own, before, found: mark, .. } = self.clone();
        let successor = self.folder.disk().work(move || {
            let found = file.read()?.filter(|found| !is_held(&own, before.as_ref(), Some(found)));
            Ok::<_, io::Error>(found.or(file.successor(&own, mark)?))
        });
        Ok(match successor.await? {
            Some(lock) => {
                let folder = self.folder.display().to_string();
                Err(ServerError::FolderTaken { job: lock.job, uid: lock.uid, folder })
            }
            None => Ok(()),
        })
    }
}
