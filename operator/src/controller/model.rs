//! The values that pass between the parts of a reconcile: the state that a decision reads, and the decision.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use psjobs_api::CheckpointResult;
use psjobs_api::crd::ParameterServerJobStatus;

use super::observe::{ObservedPod, Replica};

/// Everything outside the job's own object that a decision looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// The job's pods; Kubernetes itself allows one of a name, hence one of a rank.
    pub pods: BTreeMap<Replica, ObservedPod>,
    /// The headless service exists.
    pub service: bool,
    /// Children that the API server just refused to create, in its words.
    pub refused: Vec<Refusal>,
    /// What server 0 told last.
    pub progress: Option<ProgressReport>,
}

/// A child that could not be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub child: String,
    pub message: String,
}

/// How far training is, from server 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressReport {
    pub step: u64,
    pub total_steps: u64,
    pub examples_per_second: f64,
    pub metrics: BTreeMap<String, f64>,
    pub checkpoint: Option<CheckpointResult>,
    /// Indexes of trainers that are clearly slower than the others.
    pub stragglers: Vec<u32>,
    /// When it was told.
    pub at: Option<Timestamp>,
}

/// What to do now. The order matters: create, then write the status, then delete and tell; so that
/// a failure is on record before its evidence goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    pub create: Vec<Child>,
    pub status: ParameterServerJobStatus,
    pub delete: Vec<Deletion>,
    /// The job's time after its end is over.
    pub delete_job: bool,
    pub notices: Vec<Notice>,
    /// The job mostly leaves this state within this time: unless something is to be deleted, nobody misses it.
    pub passing: Option<Duration>,
    /// Look again then, even if nothing changes.
    pub requeue: Option<SignedDuration>,
}

/// A child to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Child {
    Service,
    Pod(NewPod),
}

/// A pod to create, and the history of its replica that it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NewPod {
    pub replica: Replica,
    pub incarnation: u32,
    pub failures: u32,
    pub failures_in_a_row: u32,
}

/// A pod to delete: this one, not one that has its name by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    pub name: String,
    pub uid: String,
    /// Do not wait for its node, which does not answer.
    pub force: bool,
}

/// An event: a sentence about the job, and the pod it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub warning: bool,
    pub reason: String,
    pub note: String,
    pub pod: Option<(String, String)>,
}
