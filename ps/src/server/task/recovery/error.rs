//! Why a server did not write or restore its part of a checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use tonic::Status;

use crate::checkpoint::WriteError;

/// An error while writing or restoring a part.
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
    /// The checkpoint is proved to be damaged.
    #[error("the checkpoint in {} cannot be used: {why}", folder.display())]
    Unusable {
        /// Its folder.
        folder: PathBuf,
        /// The fault, and what to do about it.
        why: String,
    },
    /// The checkpoint cannot be read now; it may be whole.
    #[error(
        "the checkpoint in {} cannot be read now: {why}; check that the folder is mounted and readable on server {server}",
        folder.display()
    )]
    Unreadable {
        /// Its folder.
        folder: PathBuf,
        /// The system's words.
        why: String,
        /// The server that cannot read it.
        server: u32,
    },
    /// The caller leads in another epoch than this server is in.
    #[error(
        "server {server} is in epoch {own}, not {asked}: it has gone to a checkpoint since, or another server 0 leads"
    )]
    Epoch {
        /// This server.
        server: u32,
        /// The greatest epoch that it has heard of.
        own: u64,
        /// The epoch of the request.
        asked: u64,
    },
    /// The caller was replaced.
    #[error(
        "server {server} takes no orders of server 0 in incarnation {asked}, which was replaced: incarnation {newest} leads"
    )]
    Replaced {
        /// This server.
        server: u32,
        /// The incarnation of the caller.
        asked: u32,
        /// That of the newest process that has asked for something.
        newest: u32,
    },
    /// The epoch of a restore is not on record in the checkpoint folder.
    #[error(
        "server {server} does not restore in epoch {asked}: {why}. Server 0 records an epoch in the checkpoint folder before it \
         asks for it; see that all servers have the same folder"
    )]
    NotRecorded {
        /// This server.
        server: u32,
        /// The epoch of the request.
        asked: u64,
        /// The epoch that is on record, or why none can be read.
        why: String,
    },
    /// The checkpoint is complete already, and complete checkpoints are never written again.
    #[error("the checkpoint in {} is complete; it is not written again", folder.display())]
    Complete {
        /// Its folder.
        folder: PathBuf,
    },
    /// The part was not written in time.
    #[error(
        "its part was not written within {} s; see that the checkpoint folder answers and takes 10 MB in a second, or use \
         more servers (spec.ps.replicas)",
        limit.as_secs()
    )]
    Slow {
        /// The time that it had.
        limit: Duration,
    },
    /// The step was made, and the layers that trainers train themselves did not come.
    #[error("the layers of step {0} did not come in time; see that trainer 0 is there")]
    NoLayers(u64),
    /// It is not certain that this server has all updates that were acknowledged.
    #[error("{0}")]
    MayNotLead(String),
    /// A block is past the version asked for.
    #[error("this server is past version {0}")]
    Past(u64),
    /// The model is not known or its blocks have no values yet.
    #[error("there is nothing to keep yet")]
    Empty,
}

impl From<RecoveryError> for Status {
    fn from(error: RecoveryError) -> Self {
        let text = error.to_string();
        match error {
            RecoveryError::Past(_) => Self::out_of_range(text),
            RecoveryError::Empty | RecoveryError::Unreadable { .. } | RecoveryError::NotRecorded { .. } => {
                Self::failed_precondition(text)
            }
            RecoveryError::Epoch { .. } | RecoveryError::Replaced { .. } => Self::aborted(text),
            RecoveryError::Complete { .. } => Self::already_exists(text),
            RecoveryError::Mismatch { .. } => Self::invalid_argument(text),
            RecoveryError::Unusable { .. } => Self::data_loss(text),
            RecoveryError::Write(_) => Self::internal(text),
            RecoveryError::Slow { .. } => Self::deadline_exceeded(text),
            RecoveryError::NoLayers(_) | RecoveryError::MayNotLead(_) => Self::unavailable(text),
        }
    }
}
