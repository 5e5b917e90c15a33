//! Works on the checkpoint folder for server 0: waits while it cannot be read or written, and reports it in the log and in
//! the server's status.

use std::future::pending;
use std::time::Duration;

use crate::checkpoint::Folder;
use crate::checkpoint::runs::RunsError;
use crate::checkpoint::write::WriteError;
use crate::retry::{Failure, Schedule, Stopped, retry};
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::failed_write::is_same_cause;

/// Pauses between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Interval at which the log repeats that the folder is waited for.
const QUIET: Duration = Duration::from_secs(30);

/// Why work on the folder did not succeed.
#[derive(Debug)]
pub(super) enum FolderError {
    /// It may succeed later.
    Wait(String),
    /// It would fail in the same way.
    Refuse(String),
}

impl From<RunsError> for FolderError {
    fn from(error: RunsError) -> Self {
        match error {
            RunsError::Read { .. } => {
                Self::Wait(format!("{error}; check that the checkpoint folder is mounted and readable"))
            }
            RunsError::Remove { .. } => Self::Wait(error.to_string()),
            RunsError::Damaged { .. } => Self::Refuse(error.to_string()),
        }
    }
}

impl From<WriteError> for FolderError {
    fn from(error: WriteError) -> Self {
        Self::Wait(error.to_string())
    }
}

/// Repeats `work` on the disk of `folder` until it succeeds or is refused.
///
/// # Errors
/// If it is refused.
pub(super) async fn insist<T: Send + 'static>(
    state: &ServerState,
    folder: &Folder,
    work: impl Fn() -> Result<T, FolderError> + Clone + Send + 'static,
) -> Result<T, ServerError> {
    let mut logged = None;
    let attempt = || {
        let work = work.clone();
        async move {
            folder.disk().work(work).await.map_err(|error| match error {
                FolderError::Wait(why) => Failure::Transient(why),
                FolderError::Refuse(why) => Failure::Permanent(why),
            })
        }
    };
    let waits = |why: &String, elapsed: Duration| {
        // A store's client says other times and numbers with each attempt.
        if state.recovery.trouble().is_none_or(|known| !is_same_cause(&known, why)) {
            state.recovery.set_trouble(Some(why.clone()));
        }
        if logged.is_none_or(|logged| elapsed >= logged + QUIET) {
            tracing::warn!(reason = why, "waiting for the checkpoint folder");
            logged = Some(elapsed);
        }
    };
    let done = retry(Schedule::growing(FIRST_PAUSE, LONGEST_PAUSE), pending(), attempt, waits).await;
    state.recovery.set_trouble(None);
    done.map_err(|stopped: Stopped<String, String>| match stopped {
        Stopped::Permanent(why) | Stopped::TimedOut(why) => ServerError::Checkpoint(why),
        Stopped::Cancelled => ServerError::Stopped,
    })
}
