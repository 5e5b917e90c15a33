//! What the job does about failures, deadlines and leftovers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When a trainer that ended is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartPolicy {
    /// Start a failed trainer again, up to failurePolicy.maxRestarts.
    #[default]
    OnFailure,
    /// The first failure fails the job.
    Never,
    /// Start again after a signal (exit code 128 and above), fail the job after 1 to 127.
    ExitCode,
}

/// What happens when pods fail. A disruption (eviction, preemption, a lost node, a deleted pod)
/// is replaced without counting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailurePolicy {
    /// Failed pods that are replaced before the job fails, over the whole job. Default 3.
    #[serde(default = "three")]
    #[schemars(range(min = 0, max = 10_000))]
    pub max_restarts: i32,
}

/// Which pods are deleted when the job is finished. Servers always stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CleanPodPolicy {
    /// Delete every pod of the job.
    All,
    /// Delete pods that still run; keep finished ones for their logs.
    #[default]
    Running,
    /// Keep the pods; servers that still run are deleted all the same.
    None,
}

/// Deadlines and cleaning up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunPolicy {
    /// Which pods are deleted when the job is finished: Running (default), All or None.
    #[serde(default)]
    pub clean_pod_policy: CleanPodPolicy,
    /// Delete the job this many seconds after it finished. Default: keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 315_360_000))]
    pub ttl_seconds_after_finished: Option<i64>,
    /// Fail the job when it has been active for this many seconds; a resumed job starts anew.
    /// Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub active_deadline_seconds: Option<i64>,
    /// How long servers may take to end by themselves after the last trainer is done; then they
    /// are deleted. Default 60.
    #[serde(default = "sixty")]
    #[schemars(range(min = 0, max = 86_400))]
    pub server_drain_seconds: i64,
}

impl Default for FailurePolicy {
    fn default() -> Self {
        Self { max_restarts: three() }
    }
}

impl Default for RunPolicy {
    fn default() -> Self {
        Self {
            clean_pod_policy: CleanPodPolicy::default(),
            ttl_seconds_after_finished: None,
            active_deadline_seconds: None,
            server_drain_seconds: sixty(),
        }
    }
}

fn three() -> i32 {
    3
}

fn sixty() -> i64 {
    60
}
