//! Completes a checkpoint: writes its manifest, checks that no other process has taken the folder meanwhile, and only then
//! removes what the checkpoint replaces.

use std::time::Duration;

use tonic::Status;

use super::folder_lock::Holder;
use crate::checkpoint::Disk;
use crate::server::error::ServerError;
use crate::server::state::recovery::LastCheckpoint;

/// Timeout for reading the lock.
const CONFIRM: Duration = Duration::from_secs(120);

/// Writes a manifest with `commit`, and does `tidy` if this process still has the lock after that. A process that was replaced
/// while it wrote removes nothing: its successor may go back to an earlier checkpoint.
///
/// # Errors
/// If the manifest could not be written, or another process has taken the folder, or the lock cannot be read.
pub(super) async fn complete(
    disk: Disk,
    lock: Holder,
    commit: impl FnOnce() -> Result<LastCheckpoint, Status> + Send + 'static,
    tidy: impl FnOnce() + Send + 'static,
) -> Result<LastCheckpoint, Status> {
    let newest = disk.work(commit).await?;
    // A process that takes the folder leaves its mark before it looks for checkpoints. So it sees the manifest, if its mark is
    // not there yet; otherwise it may go on from an earlier checkpoint.
    let held = tokio::time::timeout(CONFIRM, lock.confirm()).await;
    held.map_err(|_| Status::deadline_exceeded("the lock of the checkpoint folder cannot be read"))?.map_err(taken)?;
    disk.work(tidy).await;
    Ok(newest)
}

/// Says that another process has taken the folder.
pub(super) fn taken(error: ServerError) -> Status {
    Status::aborted(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use psjobs_api::{Environment, Training};
    use tonic::Code;

    use super::*;
    use crate::checkpoint::lock::{Lock, LockFile};
    use crate::checkpoint::{CheckpointId, Folder};
    use crate::server::config::{CheckpointConfig, ServerConfig};
    use crate::server::state::ServerState;
    use crate::server::task::recovery::folder_lock::FolderLock;

    #[tokio::test]
    async fn a_process_that_is_replaced_while_it_commits_removes_nothing() {
        for is_replaced in [false, true] {
            let folder = tempfile::tempdir().expect("a folder");
            let servers = vec!["ps-0:29500".to_owned()];
            let environment = Environment::new("mnist", "job-1", servers.clone(), 1, Training::default());
            let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) });
            let config = CheckpointConfig {
                job: "mnist".into(),
                incarnation: 0,
                folder: Folder::from(folder.path()),
                interval: Duration::from_secs(60),
                keep: 1,
                resume: true,
                servers,
            };
            let lock = FolderLock::take(&state, &config).await.expect("no process has it");
            let successor = Lock { job: "mnist".into(), uid: "job-1".into(), holder: 1, incarnation: 1, counter: 0 };
            let written = config.folder.clone();
            let commit = move || {
                if is_replaced {
                    LockFile::new(&written).mark(&successor).expect("writes");
                }
                Ok(LastCheckpoint::complete(CheckpointId { run: 1, step: 5 }, written))
            };
            let has_tidied = Arc::new(AtomicBool::new(false));
            let tidied = has_tidied.clone();
            let tidy = move || tidied.store(true, Ordering::Relaxed);
            let done = complete(config.folder.disk().clone(), lock.holder(), commit, tidy).await;
            assert_eq!(done.is_err_and(|status| status.code() == Code::Aborted), is_replaced);
            assert_eq!(has_tidied.load(Ordering::Relaxed), !is_replaced);
        }
    }
}
