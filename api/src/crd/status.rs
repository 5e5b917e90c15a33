//! What the operator reports about a job.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

// One writer, so one field in metadata.managedFields: its parts would be half of the object, and a fifth of what a write
// of the status costs the API server.
/// What the operator knows of the job. Written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct ParameterServerJobStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pending, Running, Restarting, Stalled, Suspended, Completing, Succeeded or Failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Short reason of the phase, one word; conditions hold the sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the job became active; a resumed job starts anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the job succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// The job's conditions, one of each type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<JobCondition>,
    /// Pods that were replaced, whatever the cause.
    #[serde(default)]
    pub restarts: i32,
    /// Pods that failed and were given another start; failurePolicy.maxRestarts bounds it.
    #[serde(default, rename = "restartsCountTowardsMax")]
    pub restarts_counted: i32,
    /// Times in a row that all pods were started again, without a healthy while between; the next
    /// time waits accordingly.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recreations_in_a_row: i32,
    /// The incarnation that replicas start from since the job was last resumed; a resumed job
    /// has new processes, and none of them may pass for an old one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_incarnation: i32,
    /// The Secret with the certificates that the job's pods show each other; a new one each time that all
    /// of them start again. Absent if they talk without TLS (spec.network.mutualTLS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<String>,
    /// When these certificates end. All pods start again before that, from a checkpoint (spec.checkpoint); without one
    /// they go on, until one of them has to start again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates_expire: Option<Time>,
    /// The job's label psjobs.dev/shard when an operator last decided about it; another one takes the pods over first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// The servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ps: Option<RoleStatus>,
    /// The trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainer: Option<RoleStatus>,
    /// The failure that the job's trouble began with: the first, not the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<LastFailure>,
    /// How far training is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The newest checkpoint that the servers have written (spec.checkpoint).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_checkpoint: Option<Checkpoint>,
    /// The trained model, when the servers have exported it (spec.checkpoint).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
}

/// Where the job is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Pods are being made or not all are ready yet.
    Pending,
    /// Servers and trainers run; of an elastic job, at least minReplicas trainers.
    Running,
    /// A lost pod is being replaced.
    Restarting,
    /// Runs, but makes no step; spec.runPolicy.progressDeadlineSeconds is over.
    Stalled,
    /// Stopped by spec.suspend.
    Suspended,
    /// The trainers are done; the servers are ending.
    Completing,
    /// Finished well. Final.
    Succeeded,
    /// Finished badly; lastFailure reports why. Final.
    Failed,
}

impl Phase {
    /// Succeeded or Failed: nothing is created any more.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// The types of a job's conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ConditionType {
    /// All children were created.
    Created,
    /// All servers are ready.
    ServersReady,
    /// All trainers run; of an elastic job, at least minReplicas do.
    Running,
    /// A pod is being replaced.
    Restarting,
    /// An elastic job has given up trainers; it trains on with the others.
    Shrunk,
    /// The job is suspended.
    Suspended,
    /// The job makes no step.
    Stalled,
    /// The servers cannot write checkpoints (spec.checkpoint), or not use their folder at all.
    CheckpointFailing,
    /// The trainers are done; the servers are ending.
    Completing,
    /// The job finished well.
    Succeeded,
    /// The job finished badly.
    Failed,
}

/// One observation about the job; the fields are those of every Kubernetes condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobCondition {
    /// Type of the condition.
    #[serde(rename = "type")]
    pub type_: ConditionType,
    /// "True", "False" or "Unknown".
    pub status: String,
    /// One word, for programs.
    pub reason: String,
    /// A sentence, for people.
    #[serde(default)]
    pub message: String,
    /// When `status` last changed.
    pub last_transition_time: Time,
    /// The generation of the spec that this was seen with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// The pods of one role.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleStatus {
    /// Pods that should exist.
    pub desired: i32,
    /// Pods that are ready.
    pub ready: i32,
    /// Pods that exist and have not ended.
    pub active: i32,
    /// Replicas that ended well.
    pub succeeded: i32,
    /// Replicas that failed and were not replaced.
    pub failed: i32,
    /// Replicas that an elastic job has given up; the condition Shrunk reports why. They are created again
    /// when the job is scaled or its spec changes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: i32,
    /// Pods that were replaced.
    pub restarts: i32,
    /// `ready/desired`, for kubectl's columns; of trainers the finished ones count as ready.
    pub summary: String,
    /// Label selector of the pods.
    pub selector: String,
    /// What is known of each replica, also of those whose pod is gone; equal ones are one entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<ReplicaGroup>,
}

/// Replicas of one role that had the same fate so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaGroup {
    /// Indexes of the replicas, for example `0-2,5`.
    pub indexes: String,
    /// Incarnation of their newest pod.
    pub incarnation: i32,
    /// How often they failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures: i32,
    /// Ends before their time in a row; the next pod waits accordingly.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures_in_a_row: i32,
    /// Incarnation of their newest pod whose program failed, if one did; pods that Kubernetes took away are not meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_incarnation: Option<i32>,
    /// Their work is done; they are not started again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub succeeded: bool,
    /// Incarnation from which their pods count: earlier ones were scaled away or given up.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub since: i32,
    /// They are given up, and not created again until the job is scaled or its spec changes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// A failed pod, as it was when it failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastFailure {
    /// Name of the pod.
    pub pod: String,
    /// `ps` or `trainer`.
    pub role: String,
    /// Rank of the pod in the job.
    pub rank: i32,
    /// Exit code of the main container, if it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// One word: Error, OOMKilled, Evicted, ...
    pub reason: String,
    /// A sentence: what happened, and what to do where that is known.
    pub message: String,
    /// The last lines of the main container's log.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub log_tail: String,
    /// When it was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// How far training is, as server 0 reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Steps done, summed over the trainers.
    pub step: i64,
    /// Steps to do, summed over the trainers; 0 while unknown.
    pub total_steps: i64,
    /// step of totalSteps, 0 to 100.
    pub percent: i32,
    /// `42%`, for kubectl's columns.
    pub summary: String,
    /// When `step` last grew; noted if spec.runPolicy.progressDeadlineSeconds is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_step_time: Option<Time>,
    /// Examples a second over all trainers, lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub examples_per_second: Option<f64>,
    /// Seconds until totalSteps at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimated_remaining_seconds: Option<i64>,
    /// Metrics that the trainers report, for example accuracy; at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub metrics: Vec<ModelMetric>,
    /// Pods of trainers that take clearly longer for a step than the median trainer (1.5 times, time
    /// spent waiting for others left out); at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub stragglers: Vec<String>,
}

/// A checkpoint that is complete.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Checkpoint {
    /// Step that it was taken at.
    pub step: i64,
    /// Its folder in the volume of spec.checkpoint.
    pub path: String,
    /// When it was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// What a job was run for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Model {
    /// The safetensors file in the volume of spec.checkpoint.
    pub path: String,
    /// The metric that shows best how good it is: accuracy where the trainers report it, else auc, perplexity,
    /// reward or the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<ModelMetric>,
}

/// A named number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelMetric {
    /// Name, for example accuracy.
    pub name: String,
    /// Value.
    pub value: f64,
}
