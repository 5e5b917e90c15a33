//! `spec.checkpoint`, as far as the servers need to know it: how often the job's state is kept, and how
//! much of it. Where it is kept is the operator's and the command's matter.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How often the servers write checkpoints, and how many they keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckpointPolicy {
    /// Seconds between two checkpoints. Training goes on while one is written. Default 60.
    #[serde(default = "default_interval")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub interval_seconds: u64,
    /// Complete checkpoints to keep; older ones are removed. Default 3.
    #[serde(default = "default_keep")]
    #[schemars(range(min = 1, max = 10_000))]
    pub keep: u32,
    /// Begin from the newest checkpoint that another job has left in the folder, if there is one. A job with checkpoints of
    /// its own goes on with those in any case. Default true.
    #[serde(default = "default_resume")]
    pub resume: bool,
}

impl Default for CheckpointPolicy {
    fn default() -> Self {
        Self { interval_seconds: default_interval(), keep: default_keep(), resume: default_resume() }
    }
}

/// Says if a folder is named by the URL of an object store, as `s3://BUCKET/FOLDER`.
#[must_use]
pub fn is_object_store(folder: &str) -> bool {
    folder.contains("://")
}

fn default_interval() -> u64 {
    60
}
fn default_keep() -> u32 {
    3
}
fn default_resume() -> bool {
    true
}
