//! The errors that end a server.

use crate::network::ServeError;
use crate::owner_tasks::Panicked;

/// An error that ends a server before its work is done.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The services failed, or could not start.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The descriptors that are part of this program are damaged.
    #[error("gRPC reflection cannot be served")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The job cannot be elastic.
    #[error("{0}")]
    Elastic(&'static str),
    /// No trainer has been active for too long.
    #[error("gave up: {0}; see their logs, then start the job again")]
    Abandoned(String),
    /// A trainer has ended with an error, and no process starts it again.
    #[error("{0}; start the job again when that is solved")]
    TrainerFailed(String),
    /// The checkpoint folder holds another job's state.
    #[error("{0}")]
    Checkpoint(String),
    /// Another job writes to the checkpoint folder.
    #[error(
        "job {job} (uid {uid}) writes its checkpoints to {folder}; wait until it has ended, or give this job a folder of \
         its own"
    )]
    FolderInUse {
        /// Name of the other job.
        job: String,
        /// Its unique id.
        uid: String,
        /// The folder.
        folder: String,
    },
    /// Another process has taken the checkpoint folder from this one.
    #[error(
        "another server 0, of job {job} (uid {uid}), has taken over the checkpoint folder {folder}; this one has stopped \
         writing to it"
    )]
    FolderTaken {
        /// Name of the job that has the folder now.
        job: String,
        /// Its unique id.
        uid: String,
        /// The folder.
        folder: String,
    },
    /// The last checkpoint or the model could not be written.
    #[error("{what} could not be written: {why}")]
    NotKept {
        /// The thing that is missing.
        what: &'static str,
        /// The fault, and what to do about it.
        why: String,
    },
    /// The other server that held blocks of this one ended before this one had all of them.
    #[error(
        "the blocks of server {shard} are lost: server {other} ended before this one had copied them; started again, \
         the servers go back to a checkpoint or are filled with a trainer's parameters"
    )]
    Lost {
        /// The server that the blocks are named after.
        shard: u32,
        /// The one that ended.
        other: u32,
    },
    /// A process that has replaced this one is known to the others.
    #[error(
        "this process of server {server}, incarnation {incarnation}, was replaced by incarnation {successor} while it still \
         ran; it ends, and its trainers go on with the servers that are there"
    )]
    Replaced {
        /// Index of the server.
        server: u32,
        /// Incarnation of this process.
        incarnation: u32,
        /// The one that has taken its place.
        successor: u32,
    },
    /// A task that owns a part of the parameters panicked.
    #[error(
        "the task of {owned} panicked ({why}), so that this server cannot answer for its part of the parameters and ends; started again, \
         it goes back to a checkpoint, copies a replica or is filled with a trainer's parameters. Please report this"
    )]
    Panicked {
        /// The block, or the part of the rows, that it owned.
        owned: String,
        /// The words of the panic.
        why: String,
    },
    /// It received the signal to stop before every trainer had finished.
    #[error("stopped before all trainers had finished")]
    Stopped,
}

impl From<Panicked> for ServerError {
    fn from(Panicked { owned, why }: Panicked) -> Self {
        Self::Panicked { owned: owned.to_string(), why }
    }
}

impl ServerError {
    /// Returns true if the server ends only because no trainer is there, or another server has ended: it is not to blame.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        matches!(self, Self::Abandoned(_) | Self::Lost { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_another_one_left_without_blocks_is_not_to_blame() {
        let rows = [
            (ServerError::Abandoned("no trainer was active for 30 s".to_owned()), true),
            (ServerError::Lost { shard: 0, other: 0 }, true),
            (ServerError::NotKept { what: "the model", why: "the disk is full".to_owned() }, false),
        ];
        for (error, want) in rows {
            assert_eq!(error.is_peer_away(), want, "{error}");
        }
    }
}
