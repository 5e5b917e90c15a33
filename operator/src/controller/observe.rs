//! Derives from a pod its meaning for the job: the main container decides it, and actions of Kubernetes are
//! distinguished from what it did itself. The rest of the operator sees pods only through this.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use kube::ResourceExt as _;
pub use psjobs_api::Replica;
use psjobs_api::crd::names;
use psjobs_api::{ReplicaResult, Role};

/// A pod of the job, reduced to what decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedPod {
    pub name: String,
    pub uid: String,
    /// From its annotations: how many pods this replica had before, and how many of them failed.
    pub incarnation: u32,
    pub failures: u32,
    /// From its annotations: how many of them ended before their time, in a row.
    pub failures_in_a_row: u32,
    /// From its annotations: the incarnation of the newest of them whose program failed, if one did.
    pub failed_incarnation: Option<u32>,
    pub phase: PodPhase,
    /// All readiness probes pass.
    pub ready: bool,
    /// Some container may still run, even if the main one has ended.
    pub alive: bool,
    /// It is being deleted and should be gone by then.
    pub deletion_deadline: Option<Timestamp>,
    /// Why it does not start, if Kubernetes says so.
    pub waiting_reason: Option<WaitingReason>,
    pub ip: Option<String>,
    pub node: Option<String>,
    /// Since when its node does not answer.
    pub node_lost: Option<Timestamp>,
}

/// The main container's way.
#[derive(Clone, Debug, PartialEq)]
pub enum PodPhase {
    Pending,
    Running,
    Succeeded { at: Timestamp, result: Option<ReplicaResult> },
    Failed(Failure),
}

/// Why a pod ended badly.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Kubernetes took the pod away; its program is not to record_failure.
    pub disruption: bool,
    pub exit_code: Option<i32>,
    /// One word.
    pub reason: String,
    /// Continues a sentence that begins with the replica, for example `ended with exit code 1`.
    pub what: String,
    /// An init container ended, not the replica's program.
    pub of_init_container: bool,
    pub log_tail: String,
    /// Types of the pod's conditions that are True.
    pub conditions: Vec<String>,
    /// When its program began, if it did.
    pub started: Option<Timestamp>,
    pub at: Timestamp,
}

/// The reason that keeps a pod from starting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingReason {
    pub reason: String,
    pub message: String,
    /// Since when no node fits the pod.
    pub unschedulable_since: Option<Timestamp>,
}

impl WaitingReason {
    /// Returns whether the reason is this pod's. Of pods that are scheduled together, schedulers report for one why it
    /// finds no node, and for the others only that some are missing.
    pub fn is_own(&self) -> bool {
        self.unschedulable_since.is_none() || self.message.contains("nodes are available")
    }
}

impl Failure {
    /// Returns how long the program ran.
    pub fn ran(&self) -> Duration {
        let ran = self.started.map(|started| self.at.duration_since(started));
        ran.and_then(|ran| ran.try_into().ok()).unwrap_or_default()
    }
}

impl ObservedPod {
    /// The main container has ended, well or badly.
    pub fn ended(&self) -> bool {
        matches!(self.phase, PodPhase::Succeeded { .. } | PodPhase::Failed(_))
    }

    /// The main container has ended well and has left a result.
    pub fn has_result(&self) -> bool {
        self.result().is_some()
    }

    /// Returns the result that the main container has left, if it has ended well.
    pub fn result(&self) -> Option<&ReplicaResult> {
        match &self.phase {
            PodPhase::Succeeded { result, .. } => result.as_ref(),
            _ => None,
        }
    }
}

/// The program of one replica in a pod: its container, and the others that belong to it.
#[derive(Clone, Copy)]
struct Program<'a> {
    /// Name of its container, the main one; empty in a pod without containers.
    container: &'a str,
    /// The pod has a server beside a trainer. Each of them has its own containers.
    is_colocated: bool,
}

/// Reads a pod: the replica of its first container. `None` if it lacks the labels of a job's pod.
pub fn observe(pod: &Pod) -> Option<(Replica, ObservedPod)> {
    let role = Role::parse(pod.labels().get(names::LABEL_ROLE)?)?;
    let index = pod.labels().get(names::LABEL_INDEX)?.parse().ok()?;
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    let container = first.map_or("", |container| container.name.as_str());
    let program = Program { container, is_colocated: pod.labels().contains_key(names::LABEL_PLACEMENT) };
    // Where the trainer's work is done the server is alone.
    let role = if program.is_server_beside() { Role::Server } else { role };
    Some((Replica { role, index }, observe_program(pod, program)))
}

/// Reads the server beside the trainer of a pod, if there is one.
pub fn observe_server_beside(pod: &Pod) -> Option<(Replica, ObservedPod)> {
    let index = pod.labels().get(names::LABEL_INDEX)?.parse().ok()?;
    let others = pod.spec.as_ref()?.containers.get(1..)?;
    let program =
        Program { container: names::SERVER_CONTAINER, is_colocated: pod.labels().contains_key(names::LABEL_PLACEMENT) };
    let is_there = others.iter().any(|container| container.name == program.container);
    (is_there && program.is_colocated).then(|| (Replica::server(index), observe_program(pod, program)))
}

fn observe_program(pod: &Pod, program: Program<'_>) -> ObservedPod {
    let number = |annotation| pod.annotations().get(annotation).and_then(|n| n.parse().ok());
    let [failures, in_a_row, failed] = if program.is_server_beside() {
        [
            names::ANNOTATION_SERVER_FAILURES,
            names::ANNOTATION_SERVER_FAILURES_IN_A_ROW,
            names::ANNOTATION_SERVER_FAILED_INCARNATION,
        ]
    } else {
        [names::ANNOTATION_FAILURES, names::ANNOTATION_FAILURES_IN_A_ROW, names::ANNOTATION_FAILED_INCARNATION]
    };
    let status = pod.status.clone().unwrap_or_default();
    ObservedPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        incarnation: number(names::ANNOTATION_INCARNATION).unwrap_or(0),
        failures: number(failures).unwrap_or(0),
        failures_in_a_row: number(in_a_row).unwrap_or(0),
        failed_incarnation: number(failed),
        phase: pod_phase(pod, &status, program),
        ready: is_ready(&status, program),
        alive: is_alive(pod, &status, program),
        deletion_deadline: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
        waiting_reason: waiting_reason(&status, program),
        ip: status.pod_ip.clone(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        node_lost: None,
    }
}

impl Program<'_> {
    fn is_server_beside(self) -> bool {
        self.is_colocated && self.container == names::SERVER_CONTAINER
    }

    /// Returns whether a container belongs to this program, and not to the other one of a colocated pod.
    fn owns(self, container: &str) -> bool {
        !self.is_colocated || (container == names::SERVER_CONTAINER) == self.is_server_beside()
    }

    fn is_main(self, container: &ContainerStatus) -> bool {
        container.name == self.container
    }

    fn main(self, status: &PodStatus) -> Option<&ContainerStatus> {
        status.container_statuses.iter().flatten().find(|container| self.is_main(container))
    }
}

/// A pod is ready when all its containers are. Of a colocated one each program's own container counts, unless the pod's node is
/// silent: then the pod alone is called not ready.
fn is_ready(status: &PodStatus, program: Program<'_>) -> bool {
    let holds = |type_| condition(status, type_).is_some_and(|(value, ..)| value == "True");
    if !program.is_colocated {
        return holds("Ready");
    }
    let is_silent = holds("ContainersReady") && !holds("Ready");
    !is_silent && program.main(status).is_some_and(|container| container.ready)
}

/// The phase follows the end of the last container a moment later, so the containers count too.
fn is_alive(pod: &Pod, status: &PodStatus, program: Program<'_>) -> bool {
    let containers =
        pod.spec.iter().flat_map(|spec| &spec.containers).filter(|container| program.owns(&container.name));
    let known = status.container_statuses.iter().flatten().filter(|container| program.owns(&container.name));
    let ended = known.filter_map(terminated).count();
    ended < containers.count() && !matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

fn pod_phase(pod: &Pod, status: &PodStatus, program: Program<'_>) -> PodPhase {
    let main = program.main(status);
    let ended = main.and_then(terminated);
    let phase = status.phase.as_deref();
    match ended {
        Some(end) if end.exit_code == 0 => {
            let result = end.message.as_deref().and_then(ReplicaResult::parse);
            PodPhase::Succeeded { at: finished_at(end, pod), result }
        }
        Some(_) => PodPhase::Failed(failure(pod, status, program)),
        None if phase == Some("Failed") => PodPhase::Failed(failure(pod, status, program)),
        None if phase == Some("Succeeded") => PodPhase::Succeeded { at: last_seen(pod), result: None },
        None if main.and_then(|c| c.state.as_ref()).is_some_and(|state| state.running.is_some()) => PodPhase::Running,
        None => PodPhase::Pending,
    }
}

fn failure(pod: &Pod, status: &PodStatus, program: Program<'_>) -> Failure {
    let culprit = culprit(status, program);
    let end = culprit.and_then(terminated);
    let at = end.map_or_else(|| last_seen(pod), |end| finished_at(end, pod));
    let exit_code = end.map(|end| end.exit_code);
    let log_tail = end.and_then(|end| end.message.clone()).unwrap_or_default();
    let started = end.and_then(|end| end.started_at.as_ref()).map(|time| time.0);
    let of_init_container = culprit.is_some_and(|container| !program.is_main(container));
    let describe = |disruption, reason: &str, what| {
        let (reason, log_tail) = (reason.to_owned(), log_tail.trim_end().to_owned());
        let conditions = true_conditions(status);
        Failure { disruption, exit_code, reason, what, of_init_container, log_tail, conditions, started, at }
    };

    if let Some((_, reason, message)) = condition(status, "DisruptionTarget").filter(|(value, ..)| *value == "True") {
        return describe(true, reason, format!("was taken away by Kubernetes ({reason}: {message})"));
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return describe(true, "PodDeleted", "was deleted".into());
    }
    match (end, culprit) {
        (Some(end), Some(container)) if end.reason.as_deref() == Some("OOMKilled") => {
            describe(false, "OOMKilled", out_of_memory(pod, &container.name))
        }
        (Some(end), Some(_)) if lost_with_its_node(end) => {
            let reason = end.reason.as_deref().unwrap_or_default();
            describe(true, "NodeRestarted", format!("ended with its node, which has started again since ({reason})"))
        }
        (Some(end), Some(container)) => {
            let reason = end.reason.as_deref().unwrap_or("Error");
            let mut what = exit_sentence(container, end.exit_code, program);
            if let Some(limit) = memory_limit(pod, &container.name).filter(|_| end.exit_code == SIGKILL) {
                // containerd loses some of the kernel's reports that a container ran out of memory (its issue 8893):
                // the reason is then the same as after any other SIGKILL.
                what += &format!(
                    "; where its memory had grown to the limit of {limit}, raise resources.limits.memory of container {}, or lower the batch size",
                    container.name
                );
            }
            describe(false, reason, what)
        }
        _ => {
            // The kubelet refused or evicted it before its containers could end by themselves.
            let reason = status.reason.as_deref().unwrap_or("PodFailed");
            let message = status.message.as_deref().unwrap_or("Kubernetes gave no message");
            describe(true, reason, format!("was stopped by its node ({reason}: {message})"))
        }
    }
}

/// The container ran when its node ended, by the reasons that containerd and the kubelet give for it: neither knows how.
fn lost_with_its_node(end: &ContainerStateTerminated) -> bool {
    matches!(end.reason.as_deref(), Some("Unknown" | "ContainerStatusUnknown"))
}

/// Exit code of a process that was ended by SIGKILL.
const SIGKILL: i32 = 128 + 9;

fn memory_limit<'a>(pod: &'a Pod, container: &str) -> Option<&'a str> {
    pod.spec
        .iter()
        .flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()))
        .find(|c| c.name == container)
        .and_then(|c| c.resources.as_ref()?.limits.as_ref()?.get("memory"))
        .map(|limit| limit.0.as_str())
}

fn out_of_memory(pod: &Pod, container: &str) -> String {
    match memory_limit(pod, container) {
        Some(limit) => format!(
            "needed more memory than the limit of {limit} and was killed (OOMKilled); raise resources.limits.memory of container {container}, or lower the batch size"
        ),
        None => format!(
            "was killed because its node ran out of memory (OOMKilled); set resources.requests.memory and resources.limits.memory of container {container}"
        ),
    }
}

fn exit_sentence(container: &ContainerStatus, code: i32, program: Program<'_>) -> String {
    let whose = if program.is_main(container) {
        String::new()
    } else {
        format!("could not start, init container {} ", container.name)
    };
    match code {
        129..=159 => format!("{whose}was killed by signal {} (exit code {code})", code - 128),
        _ => format!("{whose}ended with exit code {code}"),
    }
}

/// The container whose end explains the program's: the main one, or the init container that kept it from starting. In a colocated
/// pod that is the trainer's.
fn culprit<'a>(status: &'a PodStatus, program: Program<'_>) -> Option<&'a ContainerStatus> {
    let failed = |c: &&ContainerStatus| terminated(c).is_some_and(|end| end.exit_code != 0);
    let init = || status.init_container_statuses.iter().flatten().find(failed).filter(|_| !program.is_server_beside());
    program.main(status).filter(failed).or_else(init)
}

fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    container.state.as_ref()?.terminated.as_ref()
}

fn finished_at(end: &ContainerStateTerminated, pod: &Pod) -> Timestamp {
    end.finished_at.as_ref().map_or_else(|| last_seen(pod), |time| time.0)
}

/// The newest time that the pod itself reports; no clock is asked, so that it stays the same when read again.
fn last_seen(pod: &Pod) -> Timestamp {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let transitions = conditions.filter_map(|c| c.last_transition_time.as_ref());
    let created = pod.metadata.creation_timestamp.as_ref();
    transitions.chain(created).map(|time| time.0).max().unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Status, reason and message of a pod condition.
fn condition<'a>(status: &'a PodStatus, type_: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let condition = status.conditions.iter().flatten().find(|c| c.type_ == type_)?;
    let text = |field: &'a Option<String>| field.as_deref().unwrap_or_default();
    Some((&condition.status, text(&condition.reason), text(&condition.message)))
}

fn true_conditions(status: &PodStatus) -> Vec<String> {
    let holds = status.conditions.iter().flatten().filter(|condition| condition.status == "True");
    holds.map(|condition| condition.type_.clone()).collect()
}

fn waiting_reason(status: &PodStatus, program: Program<'_>) -> Option<WaitingReason> {
    if let Some(("False", reason @ ("Unschedulable" | "SchedulingGated"), message)) = condition(status, "PodScheduled")
    {
        let since = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled");
        let since = since.and_then(|c| c.last_transition_time.as_ref()).map(|time| time.0);
        let unschedulable_since = since.filter(|_| reason == "Unschedulable");
        return Some(WaitingReason { reason: reason.into(), message: message.into(), unschedulable_since });
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let own = containers.filter(|container| program.owns(&container.name));
    own.filter_map(|c| c.state.as_ref()?.waiting.as_ref()).find_map(|waiting| {
        // These two are on the way to a start.
        let reason = waiting.reason.clone().filter(|r| r != "ContainerCreating" && r != "PodInitializing")?;
        let message = waiting.message.clone().unwrap_or_default();
        Some(WaitingReason { reason, message, unschedulable_since: None })
    })
}

#[cfg(test)]
mod tests;
