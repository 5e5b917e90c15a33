//! Holds the lock of the checkpoint folder for server 0: takes it, renews it while the job runs, and removes it at the
//! end.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::folder::{FolderError, insist};
use crate::checkpoint::lock::{Claim, Lock, LockFile, claim, is_held};
use crate::checkpoint::{Disk, WriteError};
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;

/// Interval of renewals.
const RENEWAL: Duration = Duration::from_secs(5);

/// The lock of the folder, held by this process.
pub(super) struct FolderLock<'a> {
    config: &'a CheckpointConfig,
    file: LockFile,
    own: Lock,
    /// The one in whose place it was taken.
    before: Option<Lock>,
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
            let unreadable =
                |error| FolderError::Wait(format!("cannot read the lock of the checkpoint folder: {error}"));
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
        let lock = Self { config, file, own, before };
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
        let file = self.file.clone();
        match self.disk().work(move || file.read()).await {
            Ok(Some(lock)) if !is_held(&self.own, self.before.as_ref(), Some(&lock)) => {
                let folder = self.config.folder.display().to_string();
                Err(ServerError::FolderTaken { job: lock.job, uid: lock.uid, folder })
            }
            _ => Ok(()),
        }
    }

    /// Removes the lock, if it is still held.
    pub async fn release(&self) {
        let (file, holder) = (self.file.clone(), self.own.holder);
        if let Err(error) = self.disk().work(move || file.release(holder)).await {
            tracing::warn!(%error, "the lock of the checkpoint folder could not be removed; another job waits for it");
        }
    }

    fn disk(&self) -> &Disk {
        self.config.folder.disk()
    }

    async fn write(&self, counter: u64) -> Result<(), WriteError> {
        let (file, lock) = (self.file.clone(), Lock { counter, ..self.own.clone() });
        self.disk().work(move || file.write(&lock)).await
    }
}
