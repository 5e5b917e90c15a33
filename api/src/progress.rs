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
}
