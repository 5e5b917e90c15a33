//! A job with spec.elasticPolicy: it grows and shrinks when it is scaled, gives up a trainer rather than
//! itself, and is done when its work is, whoever is there by then.

use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::conditions::{self, Verdict};
use super::failure::{EARLY_SERVER_END, Failed};
use super::judge::{Remedy, judge};
use super::{Draft, Ledger};
use crate::controller::observe::{Life, ObservedPod, Replica};

/// Reason of the condition and the event of a trainer that no node takes.
const UNSCHEDULABLE: &str = "Unschedulable";

/// A trainer to give up: one word, and how a sentence about it goes on.
struct Loss {
    replica: Replica,
    reason: String,
    why: String,
}

impl<'a> Draft<'a> {
    /// Tells that spec.trainer.replicas has changed while the job was active.
    pub(super) fn tell_scaling(&mut self) {
        let now = self.job.trainers;
        let known = self.prev.trainer.as_ref().map(|trainer| trainer.desired.unsigned_abs());
        let Some(before) = known.filter(|&before| before != now && self.prev.phase != Some(Phase::Suspended)) else {
            return;
        };
        let (reason, what) = match before < now {
            true if self.closing => ("ScaledUp", "all work is dealt out, so that nobody joins any more".into()),
            true => ("ScaledUp", trainers(before, now, "join")),
            false => ("ScaledDown", format!("{}, the others go on", trainers(now, before, "leave"))),
        };
        self.notice(reason, format!("Scaled from {before} to {now} trainers: {what}"));
    }

    /// Whether some trainer of an elastic job has ended well: what there was to do is dealt out.
    pub(super) fn closes(&self) -> bool {
        let ended_well = |pod: &ObservedPod| matches!(pod.life, Life::Succeeded { .. });
        self.job.elastic.is_some()
            && (self.before.done(Role::Trainer) > 0 || self.pods_of(Role::Trainer).any(|(_, pod)| ended_well(pod)))
    }

    /// A trainer that would find nothing to do. The first evaluates and reports, so it is needed to the end.
    pub(super) fn comes_too_late(&self, replica: Replica) -> bool {
        is_spare(replica) && self.closing
    }

    /// Whether the trainers of an elastic job are through: one ended well, and nobody is there who has not ended.
    pub(super) fn nobody_is_left(&self, is_done: impl Fn(Replica) -> bool) -> bool {
        let has_left = |pod: &ObservedPod| match &pod.life {
            Life::Failed(failure) => judge(self.job, Some(Role::Trainer), failure).remedy == Remedy::RestartPod,
            Life::Pending => true,
            Life::Running | Life::Succeeded { .. } => false,
        };
        let is_over = |trainer| is_done(trainer) || (is_spare(trainer) && self.pod(trainer).is_none_or(has_left));
        self.closing && (self.server_has_closed() || (0..self.job.trainers).map(Replica::trainer).all(is_over))
    }

    /// Server 0, who knows the members, has ended well and long ago: whoever comes back now finds nobody.
    fn server_has_closed(&self) -> bool {
        let server = self.pod(Replica::server(0)).filter(|pod| pod.gone_by.is_none());
        server.is_some_and(|pod| match pod.life {
            Life::Succeeded { at, .. } => self.after(at, EARLY_SERVER_END) <= self.now,
            _ => false,
        })
    }

    /// Gives up trainers that the job can do without, and takes them out of `failed`.
    pub(super) fn shrink(&mut self, failed: &mut Vec<Failed<'a>>) {
        if self.job.elastic.is_none() {
            return;
        }
        let failing = self.out_of_restarts(failed);
        self.give_up(failing);
        let waiting = self.without_a_node();
        self.give_up(waiting);
        failed.retain(|failed| !self.ledger.is_lost(failed.replica));
        if self.ledger.lost().next().is_none() {
            conditions::clear(&mut self.out.status, ConditionType::Shrunk, "Recalled", self.now);
        }
    }

    /// Trainers whose failure has no restart left. Servers and the first trainer get theirs before others; if
    /// even they get none, the job fails.
    fn out_of_restarts(&self, failed: &[Failed<'a>]) -> Vec<Loss> {
        if failed.iter().any(|failed| failed.judgement.remedy != Remedy::RestartPod) {
            // The job fails, or all of it starts again.
            return Vec::new();
        }
        let failures = |ledger: &Ledger, replica| ledger.get(replica).map_or(0, |record| record.failures);
        let is_new = |replica| failures(&self.ledger, replica) > failures(&self.before, replica);
        let mut new = failed.iter().filter(|failed| is_new(failed.replica)).collect::<Vec<_>>();
        new.sort_by_key(|failed| (is_spare(failed.replica), failed.failure.at, failed.replica));
        let restarts = self.job.max_restarts.saturating_sub(self.prev.restarts_counted.unsigned_abs()) as usize;
        let beyond = if self.closing { new } else { new.split_off(restarts.min(new.len())) };
        if !self.closing && beyond.iter().any(|failed| !is_spare(failed.replica)) {
            return Vec::new();
        }
        let because = match self.closing {
            true => "nothing is left for it to do".to_owned(),
            false => format!("spec.failurePolicy.maxRestarts is {}", self.job.max_restarts),
        };
        let loss = |failed: &&Failed<'a>| Loss {
            replica: failed.replica,
            reason: failed.failure.reason.clone(),
            why: format!("{}, and {because}", failed.failure.what),
        };
        beyond.iter().filter(|failed| is_spare(failed.replica)).map(loss).collect()
    }

    /// Trainers that have found no node for too long, if everybody else has.
    fn without_a_node(&self) -> Vec<Loss> {
        let Some(timeout) = self.job.schedule_timeout else { return Vec::new() };
        let waits = |pod: &ObservedPod| pod.obstacle.as_ref().and_then(|obstacle| obstacle.unschedulable_since);
        let overdue = |pod: &ObservedPod| waits(pod).is_some_and(|since| self.after(since, timeout) <= self.now);
        let overdue = self.pods().into_iter().filter(|(_, pod)| overdue(pod)).collect::<Vec<_>>();
        if overdue.iter().any(|&(replica, _)| !is_spare(replica)) {
            return Vec::new();
        }
        let why = format!("found no node for {} s", timeout.as_secs());
        let loss = |(replica, _)| Loss { replica, reason: UNSCHEDULABLE.into(), why: why.clone() };
        overdue.into_iter().map(loss).collect()
    }

    fn give_up(&mut self, losses: Vec<Loss>) {
        let (all, min) = (self.job.trainers, self.job.least_trainers());
        let left = self.trainers_left().saturating_sub(losses.len() as u32);
        if left < min && !self.closing {
            return;
        }
        let rest = match self.closing {
            true => String::new(),
            false => format!(
                " until the job is scaled or changed, and {left} of {all} trainers go on \
                 (spec.elasticPolicy.minReplicas is {min})"
            ),
        };
        for Loss { replica, reason, why } in losses {
            let pod = self.pod(replica);
            self.ledger.give_up(replica);
            let message = format!("{replica} {why}; it is given up{rest}");
            self.warning("Shrunk", message.clone(), pod);
            self.set(ConditionType::Shrunk, Verdict::yes(reason, message));
        }
    }

    /// Trainers that the job wants and has not given up.
    pub(super) fn trainers_left(&self) -> u32 {
        self.job.trainers.saturating_sub(self.ledger.lost().count() as u32)
    }
}

/// A replica that an elastic job can do without: all but the servers and the trainer that evaluates and reports.
fn is_spare(replica: Replica) -> bool {
    replica.role == Role::Trainer && replica.index > 0
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
