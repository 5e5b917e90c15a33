//! The answer of a server at `/status` on its metrics port, as JSON. The operator asks server 0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::result::CheckpointResult;

/// How far training is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingStatus {
    /// Steps done, summed over the trainers.
    pub step: u64,
    /// Steps to do, summed over the trainers; 0 while unknown.
    pub total_steps: u64,
    /// Lately, over all trainers.
    pub examples_per_second: f64,
    /// The trainers' metrics by name, those that are numbers.
    pub metrics: BTreeMap<String, f64>,
    /// The newest complete checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointResult>,
    /// Indexes of trainers that are clearly slower than the others.
    pub stragglers: Vec<u32>,
    /// Set while checkpoints cannot be written, or the checkpoint folder not be used at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_checkpoint: Option<FailedCheckpoint>,
}

/// A fault of the place where checkpoints are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FailedCheckpoint {
    /// A sentence: the fault in the words of the disk or the store, what to do about it, and whether training goes on.
    pub message: String,
    /// When the first write failed since the last one that succeeded, in seconds since 1970; `None` if the servers wait for the
    /// folder and have written nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix_seconds: Option<u64>,
}
