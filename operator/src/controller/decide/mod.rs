//! Decides about a job: a pure function of the job, its last status, the observed state and the time. It holds no client
//! and no clock, so every behaviour is a row in a table of tests.
//!
//! A property test over random histories checks three guarantees: there are never two pods of one rank, nothing is created
//! once the job has succeeded or failed, and counters only grow, incarnations also when a replica is scaled away and back.
//! A decision repeated on its own result asks for nothing, unless it asked to be repeated at once.

mod active;
mod certificates;
mod deadline;
mod elastic;
mod failure;
mod finish;
mod phase;
mod recreate;
mod replica_history;
mod report;
mod suspend;
pub mod timing;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, ParameterServerJobStatus, Phase};
use psjobs_policy::Success;

pub use self::replica_history::ReplicaHistory;
use self::replica_history::RestartCost;
use self::timing::MAX_STATUS_DELAY;
use super::model::{Decision, Deletion, Event, ObservedState};
use super::observe::{ObservedPod, PodPhase, Replica};
use super::validate::{SpecError, ValidJob};
use crate::conditions::{self, ConditionUpdate};

/// Decides about a job that [`validate`](super::validate::validate) let through.
pub fn decide(job: &ValidJob, prev: &ParameterServerJobStatus, observed: &ObservedState, now: Timestamp) -> Decision {
    let mut builder = DecisionBuilder::new(job, prev, observed, now);
    if prev.phase.is_some_and(Phase::is_final) {
        builder.clean_up();
    } else if builder.trainers_are_done() {
        builder.complete();
    } else if job.suspended {
        builder.suspend();
    } else {
        builder.run();
    }
    builder.into_decision()
}

/// Decides about a job that cannot be run: reports why, and changes nothing until the job changes.
pub fn refuse(error: &SpecError, prev: &ParameterServerJobStatus, generation: Option<i64>, now: Timestamp) -> Decision {
    let mut status = prev.clone();
    let mut events = Vec::new();
    if !prev.phase.is_some_and(Phase::is_final) {
        const REASON: &str = "InvalidSpec";
        status.observed_generation = generation;
        status.phase = status.phase.or(Some(Phase::Pending));
        status.reason = Some(REASON.into());
        conditions::set(&mut status, ConditionType::Created, ConditionUpdate::no(REASON, error.to_string()), now);
        if status != *prev {
            events.push(Event { warning: true, reason: REASON.into(), note: error.to_string(), pod: None });
        }
    }
    Decision { status, events, ..Decision::default() }
}

/// Builds a decision.
struct DecisionBuilder<'a> {
    job: &'a ValidJob,
    prev: &'a ParameterServerJobStatus,
    observed: &'a ObservedState,
    now: Timestamp,
    /// The history of replicas as the status has it, and with what the pods show.
    before: ReplicaHistory,
    history: ReplicaHistory,
    /// All batches of an elastic job are assigned.
    closing: bool,
    out: Decision,
    wake: Option<Timestamp>,
}

impl<'a> DecisionBuilder<'a> {
    fn new(job: &'a ValidJob, prev: &'a ParameterServerJobStatus, observed: &'a ObservedState, now: Timestamp) -> Self {
        let before = ReplicaHistory::read(prev);
        let mut history = before.clone();
        let surplus = |replica: &Replica| replica.index >= job.count(replica.role);
        before.replicas().filter(surplus).for_each(|replica| history.remove(replica, None));
        // Also pods that the status does not know: one may have been created just before the job was scaled.
        let pods = observed.pods.iter().map(|(&replica, pod)| (replica, pod.incarnation));
        let pods = pods.filter(|&(replica, incarnation)| surplus(&replica) && incarnation >= before.since(replica));
        pods.for_each(|(replica, incarnation)| history.remove(replica, Some(incarnation)));
        if prev.observed_generation != job.generation {
            history.retry();
        }
        let out = Decision { status: prev.clone(), ..Decision::default() };
        let mut builder = Self { job, prev, observed, now, history, before, closing: false, out, wake: None };
        builder.closing = builder.closes();
        builder
    }

    fn into_decision(mut self) -> Decision {
        self.out.requeue = self.wake.map(|at| at.duration_since(self.now).max(SignedDuration::ZERO));
        self.out
    }

    /// Success so far: the main containers of as many trainers as the job asks for have ended well, now or
    /// earlier, or the work of an elastic job is done. A job that completes goes on completing.
    fn trainers_are_done(&self) -> bool {
        let ended_well = |pod| matches!(pod, &ObservedPod { phase: PodPhase::Succeeded { .. }, .. });
        let is_done = |trainer| self.before.succeeded(trainer) || self.pod(trainer).is_some_and(ended_well);
        let policy = &self.job.policy;
        self.prev.phase == Some(Phase::Completing)
            || policy.success.is_reached(self.job.trainers, |index| is_done(Replica::trainer(index)))
            || policy.success != Success::RankZero && self.work_is_over(is_done)
    }

    /// Tells whether a pod counts: it has a rank of the job, and was created after the job was last resumed and after the
    /// replica last left.
    fn is_current(&self, replica: Replica, pod: &ObservedPod) -> bool {
        replica.index < self.job.count(replica.role) && pod.incarnation >= self.history.since(replica)
    }

    /// Returns the pod of a replica, if it has one that counts.
    fn pod(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.observed.pods.get(&replica).filter(|pod| self.is_current(replica, pod))
    }

    /// Returns all pods that count.
    fn pods(&self) -> Vec<(Replica, &'a ObservedPod)> {
        let all = self.observed.pods.iter().map(|(&replica, pod)| (replica, pod));
        all.filter(|(replica, pod)| self.is_current(*replica, pod)).collect()
    }

    /// Returns all pods that count, without their failures.
    fn pods_without_restart_cost(&self) -> Vec<(Replica, &'a ObservedPod, RestartCost)> {
        self.pods().into_iter().map(|(replica, pod)| (replica, pod, RestartCost::default())).collect()
    }

    fn pods_of(&self, role: Role) -> impl Iterator<Item = (Replica, &'a ObservedPod)> + use<'a> {
        self.pods().into_iter().filter(move |(replica, _)| replica.role == role)
    }

    fn delete(&mut self, pod: &ObservedPod) {
        if pod.deletion_deadline.is_none() {
            let force = self.is_lost(pod);
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force });
        }
    }

    /// Returns when a pod is given up whose node does not answer.
    fn lost_at(&self, pod: &ObservedPod) -> Option<Timestamp> {
        pod.node_lost.map(|since| self.after(since, self.job.force_delete_after))
    }

    /// Tells whether the pod's node has been silent for so long that the pod is given up.
    fn is_lost(&self, pod: &ObservedPod) -> bool {
        self.lost_at(pod).is_some_and(|at| at <= self.now)
    }

    /// Deletes a pod by force that should be gone and is not: its node is lost and will not confirm the end.
    fn delete_by_force_if_overdue(&mut self, pod: &ObservedPod) {
        let Some(deletion_deadline) = pod.deletion_deadline else { return };
        let overdue = self.after(deletion_deadline, self.job.force_delete_after);
        let overdue = self.lost_at(pod).map_or(overdue, |lost| lost.min(overdue));
        if overdue <= self.now {
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force: true });
        } else {
            self.wake_at(overdue);
        }
    }

    /// Decides again at `at` or earlier.
    fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn after(&self, since: Timestamp, duration: impl TryInto<SignedDuration>) -> Timestamp {
        let duration = duration.try_into().unwrap_or(SignedDuration::MAX);
        since.saturating_add(duration).unwrap_or(Timestamp::MAX)
    }

    fn set(&mut self, type_: ConditionType, update: ConditionUpdate) {
        conditions::set(&mut self.out.status, type_, update, self.now);
    }

    fn event(&mut self, reason: &str, note: impl Into<String>) {
        self.out.events.push(Event { warning: false, reason: reason.into(), note: note.into(), pod: None });
    }

    fn warning(&mut self, reason: &str, note: impl Into<String>, pod: Option<&ObservedPod>) {
        let pod = pod.map(|pod| (pod.name.clone(), pod.uid.clone()));
        self.out.events.push(Event { warning: true, reason: reason.into(), note: note.into(), pod });
    }

    /// Formats the size of the job, for example `1 server and 2 trainers`.
    fn members(&self) -> String {
        format!("{} and {}", counted(self.job.servers, "server"), counted(self.job.trainers, "trainer"))
    }

    /// Returns when the job began: when it was created, some seconds before its first status, or resumed.
    fn start_time(&self) -> Option<Time> {
        let created = self.job.object.metadata.creation_timestamp.as_ref().filter(|_| self.prev.phase.is_none());
        let begun = || Time(created.map_or(self.now, |created| self.lately(created.0)));
        Some(self.prev.start_time.clone().unwrap_or_else(begun))
    }

    /// Clamps a timestamp from another machine to [now - longest status delay, now], to tolerate clock skew.
    fn lately(&self, at: Timestamp) -> Timestamp {
        let earliest = self.now.saturating_sub(MAX_STATUS_DELAY).unwrap_or(self.now);
        at.clamp(earliest, self.now)
    }

    fn time(&self) -> Option<Time> {
        Some(Time(self.now))
    }
}

fn counted(number: u32, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests;
