//! Completes a checkpoint: writes its manifest, checks that no other process has taken the folder meanwhile, and only then
//! removes what the checkpoint replaces.

use std::time::Duration;

use tonic::Status;

use super::folder_lock::Holder;
use crate::checkpoint::runs::Ancestor;
use crate::checkpoint::{CheckpointId, Concluded, Disk, Runs, write};
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

/// Checks that a checkpoint with so many steps of each trainer has all of those that have `concluded`. It lacks some if a server
/// that had not heard of a later leader gave its part, or went on from a copy that it had made before that one was elected.
///
/// # Errors
/// The trainer whose steps are missing, with the code `DATA_LOSS`.
pub(super) fn check_concluded(held: &[u64], concluded: &Concluded) -> Result<(), Status> {
    let held_of = |trainer: u32| held.get(trainer as usize).copied().unwrap_or(0);
    match concluded.iter().find(|(trainer, steps)| held_of(**trainer) < **steps) {
        None => Ok(()),
        Some((trainer, steps)) => {
            let has = held_of(*trainer);
            Err(Status::data_loss(format!(
                "the servers have {has} of the {steps} steps of trainer {trainer}, which has concluded"
            )))
        }
    }
}

/// Removes what the checkpoint `written` replaces, after it is on record that the run has had one: a job that has lost the
/// checkpoints of its run must find that it had some.
pub(super) fn remove_old(runs: &Runs, lineage: &[Ancestor], keep: usize, written: CheckpointId) {
    if let Err(error) = runs.note_kept(written) {
        tracing::warn!(%error, "old checkpoints stay until it is on record that there is a new one");
    } else if let Err(error) = runs.prune(lineage, keep, written) {
        tracing::warn!(%error, "old checkpoints could not be removed");
    }
}

/// Says why a checkpoint was not completed. One that another process has completed is that one's, and not to be withdrawn.
pub(super) fn not_committed(error: write::WriteError) -> Status {
    match error {
        write::WriteError::Exists { .. } => Status::aborted(error.to_string()),
        error => Status::internal(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use psjobs_api::{Environment, Training};
    use tonic::Code;

    use super::*;
    use crate::checkpoint::Folder;
    use crate::checkpoint::lock::{Lock, LockFile};
    use crate::server::config::{CheckpointConfig, ServerConfig};
    use crate::server::state::ServerState;
    use crate::server::task::recovery::folder_lock::FolderLock;

    #[test]
    fn a_checkpoint_has_all_steps_of_the_trainers_that_have_concluded() {
        let concluded = |steps: &[(u32, u64)]| steps.iter().copied().collect::<Concluded>();
        for (label, held, concluded, want) in [
            ("none has concluded", &[3, 5][..], concluded(&[]), None),
            ("it has all", &[7, 5], concluded(&[(0, 7)]), None),
            ("it has more, of a trainer whose steps are not all known", &[8, 5], concluded(&[(0, 7)]), None),
            ("a part is of before", &[6, 5], concluded(&[(0, 7)]), Some("6 of the 7 steps of trainer 0")),
            ("it is of fewer trainers", &[7], concluded(&[(0, 7), (1, 5)]), Some("0 of the 5 steps of trainer 1")),
        ] {
            let found = check_concluded(held, &concluded).err();
            assert_eq!(found.as_ref().map(Status::code), want.map(|_| Code::DataLoss), "{label}");
            assert!(found.zip(want).is_none_or(|(found, want)| found.message().contains(want)), "{label}");
        }
    }

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
