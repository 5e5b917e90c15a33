//! A job with spec.elasticPolicy: it grows and shrinks when it is scaled, gives up a trainer rather than
//! itself, and is done when its work is, with any number of trainers.

use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::Action;
use psjobs_policy::deadlines::EARLY_SERVER_END;
use psjobs_policy::elastic::{self, TrainerState, is_spare};

use super::draft::Draft;
use super::facts::{Facts, Failed, Loss, after};
use super::failure::respond;
use super::replica_history::ReplicaHistory;
use crate::conditions::ConditionUpdate;
use crate::controller::model::Event;
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

/// Reason of the condition and the event of a trainer that no node takes.
const UNSCHEDULABLE: &str = "Unschedulable";

/// A trainer to give up: one word, and how a sentence about it goes on.
struct Trouble {
    replica: Replica,
    reason: String,
    why: String,
}

impl Facts<'_> {
    /// A trainer that would find nothing to do. The first evaluates and reports, so it is needed to the end.
    pub(super) fn comes_too_late(&self, replica: Replica) -> bool {
        is_spare(replica) && self.closing
    }

    /// Returns true if the trainers of an elastic job are through, see [`elastic::work_is_over`].
    pub(super) fn work_is_over(&self, is_done: impl Fn(Replica) -> bool) -> bool {
        let is_absent = |pod: &ObservedPod| match &pod.phase {
            PodPhase::Failed(failure) => {
                respond(self.job, Some(Role::Trainer), failure).action == Action::RestartReplica
            }
            PodPhase::Pending => true,
            PodPhase::Running | PodPhase::Succeeded { .. } => false,
        };
        let state = |trainer| match self.pod(trainer) {
            _ if is_done(trainer) => TrainerState::Done,
            pod if pod.is_none_or(is_absent) => TrainerState::Absent,
            _ => TrainerState::Present,
        };
        let trainers = (0..self.job.trainers).map(Replica::trainer).map(|trainer| (trainer, state(trainer)));
        elastic::work_is_over(self.closing, self.server_has_closed(), trainers)
    }

    /// Server 0, which knows the members, has ended well and long ago: a trainer that comes back now finds no server.
    fn server_has_closed(&self) -> bool {
        let server = self.pod(Replica::server(0)).filter(|pod| pod.deletion_deadline.is_none());
        server.is_some_and(|pod| match pod.phase {
            PodPhase::Succeeded { at, .. } => after(at, EARLY_SERVER_END) <= self.now,
            _ => false,
        })
    }

    /// Returns the trainers whose failure has no restart left, see [`elastic::without_restart`].
    fn out_of_restarts(&self, failed: &[Failed<'_>]) -> Vec<Trouble> {
        if failed.iter().any(|failed| failed.response.action != Action::RestartReplica) {
            // The job fails, or all of it starts again.
            return Vec::new();
        }
        let failures = |history: &ReplicaHistory, replica| history.get(replica).map_or(0, |record| record.failures);
        let is_new = |replica| failures(&self.history, replica) > failures(&self.before, replica);
        let new = failed.iter().filter(|failed| is_new(failed.replica));
        let new = new.map(|failed| (failed.replica, failed.failure.at)).collect::<Vec<_>>();
        let max_restarts = self.job.policy.max_restarts;
        let left = max_restarts.saturating_sub(self.prev.restarts_counted.unsigned_abs());
        let given_up = elastic::without_restart(&new, left, self.closing);
        let because = elastic::because(self.closing, max_restarts);
        let loss = |failed: &Failed<'_>| Trouble {
            replica: failed.replica,
            reason: failed.failure.reason.clone(),
            why: format!("{}, and {because}", failed.failure.what),
        };
        let of = |replica: &Replica| failed.iter().find(|failed| failed.replica == *replica);
        given_up.iter().filter_map(of).map(loss).collect()
    }

    /// Trainers that have found no node for too long, if everybody else has.
    fn without_a_node(&self) -> Vec<Trouble> {
        let Some(timeout) = self.job.schedule_timeout else { return Vec::new() };
        let waits = |pod: &ObservedPod| {
            pod.waiting_reason.as_ref().and_then(|waiting_reason| waiting_reason.unschedulable_since)
        };
        let overdue = |pod: &ObservedPod| waits(pod).is_some_and(|since| after(since, timeout) <= self.now);
        let overdue = self.pods().into_iter().filter(|(_, pod)| overdue(pod)).collect::<Vec<_>>();
        if overdue.iter().any(|&(replica, _)| !is_spare(replica)) {
            return Vec::new();
        }
        let why = format!("found no node for {} s", timeout.as_secs());
        let loss = |(replica, _)| Trouble { replica, reason: UNSCHEDULABLE.into(), why: why.clone() };
        overdue.into_iter().map(loss).collect()
    }

    /// Gives up trainers that the job can do without: those that have no restart left, then those without a node.
    pub(super) fn give_up_trainers(&mut self) {
        if self.job.policy.elastic.is_some() {
            self.give_up(self.out_of_restarts(&self.all_failed));
            self.give_up(self.without_a_node());
        }
    }

    fn give_up(&mut self, losses: Vec<Trouble>) {
        let (all, min) = (self.job.trainers, self.job.least_trainers());
        let left = self.trainers_left().saturating_sub(losses.len() as u32);
        if !self.job.policy.elastic.is_some_and(|elastic| elastic.may_shrink_to(left, self.closing)) {
            return;
        }
        let rest = match self.closing {
            true => String::new(),
            false => format!(
                " until the job is scaled or changed, and {left} of {all} trainers go on \
                 (spec.elasticPolicy.minReplicas is {min})"
            ),
        };
        for Trouble { replica, reason, why } in losses {
            let message = format!("{replica} {why}; it is given up{rest}");
            let pod = self.pod(replica).map(|pod| (pod.name.clone(), pod.uid.clone()));
            self.losses.push(Loss { reason, message, pod });
            self.history.give_up(replica);
        }
    }

    /// Trainers that the job wants and has not given up.
    pub(super) fn trainers_left(&self) -> u32 {
        self.job.trainers.saturating_sub(self.history.lost().count() as u32)
    }
}

impl Draft<'_, '_> {
    /// Reports that spec.trainer.replicas has changed while the job was active.
    pub(super) fn report_scaling(&mut self) {
        let facts = self.facts;
        let now = facts.job.trainers;
        let known = facts.prev.trainer.as_ref().map(|trainer| trainer.desired.unsigned_abs());
        let Some(before) = known.filter(|&before| before != now && facts.prev.phase != Some(Phase::Suspended)) else {
            return;
        };
        let (reason, what) = match before < now {
            true if facts.closing => ("ScaledUp", "all work is dealt out, so that no trainer joins any more".into()),
            true => ("ScaledUp", trainers(before, now, "join")),
            false => ("ScaledDown", format!("{}, the others go on", trainers(now, before, "leave"))),
        };
        self.event(reason, format!("Scaled from {before} to {now} trainers: {what}"));
    }

    /// Reports which trainers are given up, and clears the condition when none is any more.
    pub(super) fn report_losses(&mut self) {
        let facts = self.facts;
        for Loss { reason, message, pod } in &facts.losses {
            let (reason, message) = (reason.clone(), message.clone());
            let note = message.clone();
            self.out.events.push(Event { warning: true, reason: "Shrunk".into(), note, pod: pod.clone() });
            self.set(ConditionType::Shrunk, ConditionUpdate::yes(reason, message));
        }
        if facts.job.policy.elastic.is_some() && facts.history.lost().next().is_none() {
            self.clear(ConditionType::Shrunk, "Recalled");
        }
    }
}

/// `trainer 2 joins`, `trainers 2 and 3 join`, `trainers 2 to 4 join`: those from `first` to the one before `end`.
fn trainers(first: u32, end: u32, verb: &str) -> String {
    let last = end - 1;
    match end - first {
        1 => format!("trainer {first} {verb}s"),
        2 => format!("trainers {first} and {last} {verb}"),
        _ => format!("trainers {first} to {last} {verb}"),
    }
}
