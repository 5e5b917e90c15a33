//! When the job's pods start, when the job has succeeded, how long things may take, what is left at
//! the end, and how the pods are scheduled.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When a pod that ended badly is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartPolicy {
    /// Start a failed pod again, up to failurePolicy.maxRestarts.
    #[default]
    OnFailure,
    /// The first failure fails the job.
    Never,
    /// Start again after a signal (exit code 128 and above), fail the job after 1 to 127.
    ExitCode,
}

/// When the trainers' pods are created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StartupPolicy {
    /// Trainers when all servers are ready, so that no GPU waits for a server's image.
    #[default]
    ServersReady,
    /// All pods at once; trainers wait for the servers themselves.
    AnyOrder,
}

/// When the job has succeeded. What still runs then is stopped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SuccessPolicy {
    /// All (default): when every trainer ended well; of an elastic job, whose work is dealt out, when all
    /// that are there have ended and one of them well. Any: when minSucceeded of them did. RankZero: when
    /// trainer 0 did.
    #[serde(default)]
    pub operator: SuccessOperator,
    /// With Any: how many trainers must end well. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub min_succeeded: Option<i32>,
}

/// Whose success is the job's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SuccessOperator {
    /// That of all trainers.
    #[default]
    All,
    /// That of any minSucceeded trainers.
    Any,
    /// That of trainer 0.
    RankZero,
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
    /// Fail the job when it does not run this many seconds after it started, for example because an
    /// image does not exist; the condition Failed says what it waited for. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub startup_deadline_seconds: Option<i64>,
    /// When a running job makes no step for this many seconds it is Stalled, and all its pods are
    /// started again, as after a failure with the reason Stalled: failurePolicy.rules can say
    /// otherwise. Choose it longer than the longest pause between two steps, for example an
    /// evaluation. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub progress_deadline_seconds: Option<i64>,
    /// A pod that is still there this long after it should have been gone, because its node does
    /// not answer, is deleted by force, so that it can be replaced. Default 30.
    #[serde(default = "thirty")]
    #[schemars(range(min = 0, max = 86_400))]
    pub force_delete_after_seconds: i64,
    /// How long servers may take to end by themselves after the last trainer is done; then they
    /// are deleted. With spec.checkpoint server 0 has the time that it needs to write the model. Default 60.
    #[serde(default = "sixty")]
    #[schemars(range(min = 0, max = 86_400))]
    pub server_drain_seconds: i64,
}

/// Who schedules a job's pods all together or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SchedulingBackend {
    /// No group: each pod is scheduled by itself.
    None,
    /// Kubernetes' own scheduler, by a Workload and a PodGroup of scheduling.k8s.io/v1beta1.
    Workload,
    /// Volcano, by its PodGroup.
    Volcano,
    /// The scheduler plugin Coscheduling, by its PodGroup.
    Coscheduling,
}

/// How the job's pods are scheduled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SchedulingPolicy {
    /// Who schedules the pods all together or not at all, so that two jobs never hold half of their
    /// GPUs each: Workload (Kubernetes' own scheduler, 1.37 with the feature GenericWorkload), Volcano
    /// or Coscheduling (scheduler-plugins), which must be installed. Pods whose template names no
    /// scheduler get that of Volcano or Coscheduling. Default: None, each pod by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<SchedulingBackend>,
    /// With a backend: how many pods must find a node before any of them starts. Default: all
    /// servers and trainers, of an elastic job all servers and elasticPolicy.minReplicas trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4224))]
    pub min_available: Option<i32>,
    /// When some pod finds no node for this many seconds, all pods are deleted, so that others can
    /// use what they hold; they are created again after as long. An elastic job rather gives up trainers
    /// that find none, if minReplicas others are left. Default: wait for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub schedule_timeout_seconds: Option<i64>,
    /// Priority class of pods whose template names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// Label of nodes whose value all pods of the job must share, for example
    /// topology.kubernetes.io/zone: they run close to each other. Default: anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 316))]
    pub topology_key: Option<String>,
    /// With the backend Volcano its queue. Else the local queue of Kueue, which then admits the
    /// job's pods all together (its integration `pod` must be on). Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub queue: Option<String>,
}

impl Default for RunPolicy {
    fn default() -> Self {
        Self {
            clean_pod_policy: CleanPodPolicy::default(),
            ttl_seconds_after_finished: None,
            active_deadline_seconds: None,
            startup_deadline_seconds: None,
            progress_deadline_seconds: None,
            force_delete_after_seconds: thirty(),
            server_drain_seconds: sixty(),
        }
    }
}

fn thirty() -> i64 {
    30
}

fn sixty() -> i64 {
    60
}
