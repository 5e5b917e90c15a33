//! The values that pass between the parts of a reconcile: the state that a decision reads, and the decision.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use psjobs_api::crd::{ParameterServerJobStatus, names};
use psjobs_api::{CheckpointResult, FailedCheckpoint};

use super::observe::{ObservedPod, Replica};

/// State that a decision reads besides the job's own object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedState {
    /// The job's pods. Kubernetes allows one pod of a name, hence there is one of a rank.
    pub pods: BTreeMap<Replica, ObservedPod>,
    /// The headless service exists.
    pub service: bool,
    /// Children that the API server just refused to create, in its words.
    pub refused: Vec<Refusal>,
    /// The last report of server 0.
    pub progress: Option<ProgressReport>,
    /// The last answer of server 0 about the place where checkpoints are kept.
    pub checkpoints: Option<CheckpointReport>,
    /// The name of the Secret that is tried next for the job's certificates, because somebody else has made the one that
    /// was to be created.
    pub next_certificates: Option<String>,
}

/// A child that could not be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub child: String,
    pub message: String,
}

/// The progress of training, as server 0 reports it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressReport {
    pub step: u64,
    pub total_steps: u64,
    pub examples_per_second: f64,
    pub metrics: BTreeMap<String, f64>,
    pub checkpoint: Option<CheckpointResult>,
    /// Indexes of trainers that are clearly slower than the others.
    pub stragglers: Vec<u32>,
    /// When it arrived.
    pub at: Option<Timestamp>,
}

/// Says whether checkpoints can be written, as server 0 reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointReport {
    /// The fault, if they cannot.
    pub failure: Option<FailedCheckpoint>,
    /// When it arrived.
    pub at: Timestamp,
}

/// The actions for a job, in this order: create, then write the status, then delete and record events, so that a failure
/// is on record before its evidence is deleted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    pub create: Vec<Child>,
    pub status: ParameterServerJobStatus,
    pub delete: Vec<Deletion>,
    /// spec.runPolicy.ttlSecondsAfterFinished has passed.
    pub delete_job: bool,
    pub events: Vec<Event>,
    /// Most jobs leave this state within this time, so that its status need not be written earlier, unless something is to
    /// be deleted.
    pub transient_for: Option<Duration>,
    /// When to decide again even if nothing changes.
    pub requeue: Option<SignedDuration>,
}

/// A child to create.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Child {
    Service,
    Pod(NewPod),
}

/// A pod to create, and the history of its replica that it carries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NewPod {
    pub replica: Replica,
    pub incarnation: u32,
    pub failures: u32,
    pub failures_in_a_row: u32,
    pub failed_incarnation: Option<u32>,
    /// The trainers that a server does not wait for, because they have finished.
    pub finished_trainers: Vec<u32>,
    /// All batches of an elastic job are assigned, and no trainer comes any more: a server waits for one alone.
    pub closing: bool,
    /// The server that shares the pod of this trainer.
    pub server: Option<ColocatedServer>,
}

/// The server in the pod of a trainer, and the history of its replica that the pod carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ColocatedServer {
    pub failures: u32,
    pub failures_in_a_row: u32,
    pub failed_incarnation: Option<u32>,
    /// The work of the trainer is done: the pod has the server alone.
    pub is_alone: bool,
}

impl NewPod {
    /// Returns the first pod of a replica.
    pub const fn first(replica: Replica) -> Self {
        Self {
            replica,
            incarnation: 0,
            failures: 0,
            failures_in_a_row: 0,
            failed_incarnation: None,
            finished_trainers: Vec::new(),
            closing: false,
            server: None,
        }
    }

    /// Returns the name of the pod of a job.
    pub fn name(&self, job: &str) -> String {
        names::pod(job, self.replica.role, self.replica.index)
    }
}

/// A pod to delete; the uid protects another pod that has its name by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    pub name: String,
    pub uid: String,
    /// Delete at once, because its node does not answer.
    pub force: bool,
}

/// A Kubernetes event: a sentence about the job, and the pod it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub warning: bool,
    pub reason: String,
    pub note: String,
    pub pod: Option<(String, String)>,
}
