//! A decision while it is made: the facts, and what was decided so far. Each file of this folder writes one part of it.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{ConditionType, Phase};

use super::facts::{Facts, after};
use crate::conditions::{self, ConditionUpdate};
use crate::controller::model::{Decision, Deletion, Event};
use crate::controller::observe::ObservedPod;

/// The earliest time at which a decision is to be made again, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wake(Option<Timestamp>);

impl Wake {
    /// Decides again at `at` or earlier.
    pub fn at(&mut self, at: Timestamp) {
        self.0 = Some(self.0.map_or(at, |wake| wake.min(at)));
    }

    /// Returns true if `end` has passed at `now`; if not, looks again when it has.
    pub fn is_over(&mut self, end: Timestamp, now: Timestamp) -> bool {
        if end > now {
            self.at(end);
        }
        end <= now
    }
}

pub(super) struct Draft<'f, 'a> {
    pub facts: &'f Facts<'a>,
    pub out: Decision,
    pub wake: Wake,
}

impl<'f, 'a> Draft<'f, 'a> {
    pub fn new(facts: &'f Facts<'a>) -> Self {
        let out = Decision { status: facts.prev.clone(), ..Decision::default() };
        Self { facts, out, wake: Wake::default() }
    }

    pub fn into_decision(mut self) -> Decision {
        let now = self.facts.now;
        self.out.requeue = self.wake.0.map(|at| at.duration_since(now).max(SignedDuration::ZERO));
        self.out
    }

    pub fn delete(&mut self, pod: &ObservedPod) {
        if pod.deletion_deadline.is_none() && !self.deletes(pod) {
            let force = self.facts.is_lost(pod);
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force });
        }
    }

    /// Returns whether this decision deletes a pod already: two replicas of a colocated job share one.
    fn deletes(&self, pod: &ObservedPod) -> bool {
        self.facts.job.colocated && self.out.delete.iter().any(|deletion| deletion.uid == pod.uid)
    }

    /// Deletes all pods, by force those that should be gone and are not.
    pub fn delete_all(&mut self) {
        for pod in self.facts.observed.pods.values() {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }
    }

    /// Deletes a pod by force that should be gone and is not: its node is lost and will not confirm the end.
    pub fn delete_by_force_if_overdue(&mut self, pod: &ObservedPod) {
        let Some(deletion_deadline) = pod.deletion_deadline else { return };
        let overdue = after(deletion_deadline, self.facts.job.force_delete_after);
        let overdue = self.facts.lost_at(pod).map_or(overdue, |lost| lost.min(overdue));
        if self.wake.is_over(overdue, self.facts.now) && !self.deletes(pod) {
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force: true });
        }
    }

    /// Sets a condition. One that the status does not have yet, and that does not hold, has not held since the job began.
    pub fn set(&mut self, type_: ConditionType, update: ConditionUpdate) {
        let is_old = !update.holds && conditions::find(&self.out.status, type_).is_none();
        let at = if is_old { self.facts.start_time() } else { self.facts.now };
        conditions::set(&mut self.out.status, type_, update, at);
    }

    /// Sets a condition to False, if the status has it.
    pub fn clear(&mut self, type_: ConditionType, reason: &str) {
        conditions::clear(&mut self.out.status, type_, reason, self.facts.now);
    }

    pub fn set_phase(&mut self, phase: Phase, reason: impl Into<Option<String>>) {
        self.out.status.phase = Some(phase);
        self.out.status.reason = reason.into();
    }

    /// Notes the spec that this decision is about, and since when the job is active.
    pub fn note_start(&mut self) {
        self.out.status.observed_generation = self.facts.job.generation;
        self.out.status.start_time = Some(Time(self.facts.start_time()));
    }

    pub fn event(&mut self, reason: &str, note: impl Into<String>) {
        self.out.events.push(Event { warning: false, reason: reason.into(), note: note.into(), pod: None });
    }

    pub fn warning(&mut self, reason: &str, note: impl Into<String>, pod: Option<&ObservedPod>) {
        let pod = pod.map(|pod| (pod.name.clone(), pod.uid.clone()));
        self.out.events.push(Event { warning: true, reason: reason.into(), note: note.into(), pod });
    }
}

/// Formats a number of things, for example `1 server` or `2 trainers`.
pub(super) fn counted(number: u32, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
