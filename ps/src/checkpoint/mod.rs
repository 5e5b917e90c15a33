//! Checkpoints on disk: what a job needs to go on as if nothing had happened.
//!
//! ```text
//! DIR/lock.json                              the job that writes here
//! DIR/lock-00003.json                        the incarnation of its server 0, from the second one on
//! DIR/run-00002/run.json                     one life of training: its job, and the checkpoint that it began from
//! DIR/run-00002/kept.json                    the first complete checkpoint of the run: there was one
//! DIR/run-00002/step-000000001234/
//!     ps-00000-of-00002.safetensors          one part for each server
//!     ps-00001-of-00002.safetensors
//!     rows-00000-of-00002.safetensors        the same for the rows of sparse tables, if there are any
//!     manifest.json                          written last: the checkpoint is complete
//! DIR/run-00002/metrics/                     the series of the job's metrics, see [`crate::series`]
//! DIR/model.safetensors                      the trained model, when the job is done
//! DIR/tables.safetensors                     its sparse tables
//! ```
//!
//! [`format`](self::format) says what is in a part, [`write`] and [`read`] move it to and from disk, [`catalog`]
//! lists the checkpoints of a run, [`runs`] chooses the run of a job and says which checkpoints belong to it, [`lock`]
//! keeps other jobs out, [`export`] makes the model out of a checkpoint. All of them reach their files through [`disk`].
//! Nothing here uses the network: the servers decide when a checkpoint is taken.

pub mod catalog;
pub mod disk;
pub mod export;
pub mod format;
pub mod lock;
pub mod read;
pub mod rows;
pub mod runs;
pub mod write;

#[cfg(test)]
mod tests;

pub use catalog::Catalog;
pub use disk::{Disk, Folder};
pub use format::{Concluded, Description, Manifest};
pub use read::{Checkpoint, Damage};
pub use runs::{CheckpointId, Runs};
pub use write::{PartWriter, WriteError};

/// Everything about one block of parameters that outlives its server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockState {
    /// The parameters.
    pub values: Vec<f32>,
    /// The optimizer's state, each slot as long as the values.
    pub slots: Vec<Vec<f32>>,
    /// The values before the last update, where the block keeps them and its trainers may be in the middle of a step; else
    /// empty.
    pub previous: Vec<f32>,
    /// Updates that the optimizer state has seen.
    pub updates: u64,
    /// Updates of the values over the whole job.
    pub version: u64,
    /// By trainer index: the first step whose gradient the values do not contain.
    pub next_steps: Vec<u64>,
}
