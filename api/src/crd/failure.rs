//! `spec.failurePolicy`: which failures end the job, which start a pod or the whole job again, and how
//! long to wait before that.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::role::Role;

/// What happens when pods fail. A disruption (eviction, preemption, a lost node, a deleted pod)
/// is replaced without counting. Exit code 2 of a pod's first container means wrong input and fails the
/// job, unless a rule says otherwise.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailurePolicy {
    /// Failures that are given another start before the job fails, over the whole job. Default 3.
    #[serde(default = "three")]
    #[schemars(range(min = 0, max = 10_000))]
    pub max_restarts: i32,
    /// What is started again after a failure. FailedPod (default): the pod that failed; the others
    /// wait for it. RecreateAll: all pods of the job, for programs whose members must start
    /// together; it counts once, however many pods failed.
    #[serde(default)]
    pub restart_strategy: RestartStrategy,
    /// What to do about certain failures; the first rule that matches decides, and without one
    /// restartPolicy and restartStrategy do. Exit code 2, by which programs say that a flag is wrong or
    /// data is missing, fails the job at once, with the program's last line as its cause; a program
    /// that means something else by it needs a rule, for example
    /// `{name: busy, action: RestartPod, onExitCodes: [2]}`. At most 20. Example:
    /// `[{name: no-license, action: FailJob, onExitCodes: [64], targetRoles: [trainer]}]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub rules: Vec<FailureRule>,
    /// How long to wait between the starts of a replica that keeps failing.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self.initialSeconds <= self.maxSeconds")
        .message("spec.failurePolicy.backoff.initialSeconds is above maxSeconds; write a smaller one, or raise maxSeconds"))]
    pub backoff: Backoff,
}

/// What is started again after a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartStrategy {
    /// The pod that failed.
    #[default]
    FailedPod,
    /// All pods of the job.
    RecreateAll,
}

/// What to do about failures of one kind. It matches a failure that fits every on... field and
/// targetRoles; of a field with several values one must fit. Exit codes say nothing about a
/// disruption, so a rule that is to match one needs onReasons or onPodConditions.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureRule {
    /// Name of the rule; events and conditions mention it. Unique in the list.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// FailJob: the job fails. RestartPod: the pod is started again. RestartJob: all pods are.
    /// Ignore: the pod is started again, and the failure never counts.
    pub action: FailureAction,
    /// Whether a restart by this rule counts towards maxRestarts. Default true; a disruption never
    /// counts.
    #[serde(default = "yes")]
    pub count_towards_max: bool,
    /// Exit codes of the main container, 1 to 255, for example [42, 137].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(range(min = 1, max = 255)), extend("x-kubernetes-list-type" = "set"))]
    pub on_exit_codes: Vec<i32>,
    /// Reasons as lastFailure.reason has them, for example [OOMKilled, Evicted, Stalled].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub on_reasons: Vec<String>,
    /// Types of pod conditions that are True, for example [DisruptionTarget].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub on_pod_conditions: Vec<String>,
    /// Roles whose failures it is about, [ps], [trainer] or both. Default: both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), extend("x-kubernetes-list-type" = "set"))]
    pub target_roles: Vec<TargetRole>,
}

/// What a rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FailureAction {
    /// The job fails at once.
    FailJob,
    /// The pod is started again.
    RestartPod,
    /// All pods are started again.
    RestartJob,
    /// The pod is started again, without counting.
    Ignore,
}

/// A role that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TargetRole {
    /// The parameter servers.
    Ps,
    /// The trainers.
    Trainer,
}

impl TargetRole {
    /// Whether it is about this role.
    #[must_use]
    pub fn is(self, role: Role) -> bool {
        (self == Self::Ps) == (role == Role::Server)
    }
}

/// How long to wait between the starts of a replica that keeps failing. The first restart is at
/// once; then initialSeconds, twice that, and so on up to maxSeconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Backoff {
    /// Before the second restart in a row. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 86_400))]
    pub initial_seconds: i64,
    /// The longest wait. Default 60.
    #[serde(default = "sixty")]
    #[schemars(range(min = 0, max = 86_400))]
    pub max_seconds: i64,
    /// A pod that ran for this long was healthy: its next restart is at once again. Default 600.
    #[serde(default = "ten_minutes")]
    #[schemars(range(min = 1, max = 86_400))]
    pub reset_after_seconds: i64,
}

impl Default for FailurePolicy {
    fn default() -> Self {
        Self {
            max_restarts: three(),
            restart_strategy: RestartStrategy::default(),
            rules: Vec::new(),
            backoff: Backoff::default(),
        }
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial_seconds: one(), max_seconds: sixty(), reset_after_seconds: ten_minutes() }
    }
}

fn three() -> i32 {
    3
}
fn yes() -> bool {
    true
}
fn one() -> i64 {
    1
}
fn sixty() -> i64 {
    60
}
fn ten_minutes() -> i64 {
    600
}
