//! Checkpoints on disk: what a job needs to go on as if nothing had happened.
//!
//! ```text
//! DIR/step-000000001234/ps-00000-of-00002.safetensors     one part for each server
//! DIR/step-000000001234/ps-00001-of-00002.safetensors
//! DIR/step-000000001234/rows-00000-of-00002.safetensors   the same for the rows of sparse tables, if there are any
//! DIR/step-000000001234/manifest.json                     written last: the checkpoint is complete
//! DIR/model.safetensors                                   the trained model, when the job is done
//! DIR/tables.safetensors                                  its sparse tables
//! ```
//!
//! [`format`](self::format) says what is in a part, [`write`] and [`read`] move it to and from disk, [`catalog`]
//! knows which checkpoints a folder holds, [`export`] makes the model out of one. Nothing here knows
//! the network: who takes a checkpoint when is the server's matter.

pub mod catalog;
mod disk;
pub mod export;
pub mod format;
pub mod read;
pub mod rows;
pub mod write;

#[cfg(test)]
mod tests;

pub use catalog::Catalog;
pub(crate) use disk::on_disk;
pub use format::{Description, Manifest};
pub use read::{Checkpoint, Damage};
pub use write::{PartWriter, WriteError};

/// Everything about one block of parameters that outlives its server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockState {
    /// The parameters.
    pub values: Vec<f32>,
    /// The optimizer's state, each slot as long as the values.
    pub slots: Vec<Vec<f32>>,
    /// Updates that the optimizer state has seen.
    pub updates: u64,
    /// Updates of the values over the whole job.
    pub version: u64,
    /// By trainer index: the first step whose gradient the values do not contain.
    pub next_steps: Vec<u64>,
}
