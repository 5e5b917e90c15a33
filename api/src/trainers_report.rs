//! The answer of server 0 at `/trainers` on its metrics port, as JSON: what the page of a job shows of its trainers. psjobs-web
//! asks while somebody looks at the job.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The trainers as server 0 knows them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainersReport {
    /// Steps done, summed over the trainers; in an elastic job batches.
    pub step: u64,
    /// All trainers by index; those of an elastic job that have come.
    pub trainers: Vec<TrainerReport>,
    /// Updates of server 0 by staleness: 0, 1, 2, up to 4, up to 8 and so on by powers of two.
    pub staleness: Vec<u64>,
}

/// One trainer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainerReport {
    /// Its index.
    pub index: u32,
    /// Its presence.
    pub state: TrainerState,
    /// Steps that it has done.
    pub step: u64,
    /// Lately.
    pub examples_per_second: f64,
    /// Its metrics by name, those that are numbers.
    pub metrics: BTreeMap<String, f64>,
    /// Its own pace is clearly below that of the others.
    pub is_slow: bool,
    /// Where the time of its process has gone, if it measures that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spent: Option<TimeSpent>,
}

/// The presence of a trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainerState {
    /// It has not joined yet.
    #[default]
    Awaited,
    /// It trains.
    Active,
    /// It has joined, and was silent for longer than the stated time.
    Silent,
    /// It has left, and is going to be replaced.
    Left,
    /// Its work is done.
    Finished,
}

impl TrainerState {
    /// Returns the word for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Awaited => "awaited",
            Self::Active => "active",
            Self::Silent => "silent",
            Self::Left => "left",
            Self::Finished => "finished",
        }
    }
}

/// Where the time of one process of a trainer has gone so far, in seconds. No part has what another one has; `total` has all
/// of them and the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeSpent {
    /// Since it began with its steps.
    pub total: f64,
    /// Waiting for its next batch.
    pub data: f64,
    /// Computing the loss.
    pub forward: f64,
    /// Computing the gradient.
    pub backward: f64,
    /// Both, where they are not told apart.
    pub compute: f64,
    /// Waiting for servers, the network and other trainers.
    pub exchange: f64,
}
