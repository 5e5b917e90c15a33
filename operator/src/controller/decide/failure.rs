//! Failures: which pods failed, whether the job gives up over them, and which one it began with.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, LastFailure};
use psjobs_api::exit_code::PEER_AWAY;
use psjobs_policy::deadlines::{EARLY_SERVER_END, ENDED_EARLY};
use psjobs_policy::{Action, Response};

use super::draft::Draft;
use super::facts::{Facts, Failed, after};
use super::finish::End;
use super::replica_history::{ReplicaHistory, RestartCost};
use crate::conditions;
use crate::controller::observe::{Failure, ObservedPod, PodPhase, Replica};
use crate::controller::validate::ValidJob;

/// How long the last log lines in the status may be.
const LOG_TAIL_BYTES: usize = 2048;

impl<'a> Facts<'a> {
    /// Adds the ends of pods to the history, as those of an active job: which of them failed, and which trainers it gives
    /// up over that.
    pub(super) fn with_failures(mut self) -> Self {
        let ends = self.pods().into_iter().map(|(replica, pod)| (replica, pod, self.restart_cost(replica, pod)));
        let ends = ends.collect::<Vec<_>>();
        self.history.observe(ends);
        let trainers = (0..self.job.trainers).map(Replica::trainer);
        let left = trainers.filter(|trainer| self.has_left(*trainer)).collect::<Vec<_>>();
        left.into_iter().for_each(|trainer| self.history.conclude(trainer));
        self.all_failed = self.failed_pods();
        self.give_up_trainers();
        let kept = self.all_failed.iter().filter(|failed| !self.history.is_lost(failed.replica));
        self.failed = kept.cloned().collect();
        self
    }

    /// Returns the pods that failed.
    fn failed_pods(&self) -> Vec<Failed<'a>> {
        let failed = |(replica, pod): (Replica, &'a ObservedPod)| {
            let failure = self.failure(replica, pod)?;
            let response = respond(self.job, Some(replica.role), &failure);
            Some(Failed { replica, pod, failure, response })
        };
        self.pods().into_iter().filter_map(failed).collect()
    }

    /// Returns what a pod's end adds to its replica's record, nothing if it did not end badly.
    fn restart_cost(&self, replica: Replica, pod: &ObservedPod) -> RestartCost {
        self.failure(replica, pod)
            .map(|failure| restart_cost(self.job, replica.role, pod, &failure))
            .unwrap_or_default()
    }

    /// Returns why a pod failed, if it did.
    fn failure(&self, replica: Replica, pod: &ObservedPod) -> Option<Failure> {
        if self.is_not_missed(replica) {
            return None;
        }
        match &pod.phase {
            PodPhase::Failed(failure) => Some(failure.clone()),
            PodPhase::Succeeded { at, result } if replica.role == Role::Server => {
                self.early_end(replica, *at, result.is_some())
            }
            _ => self.loss(pod),
        }
    }

    /// The end of a server although trainers need it. One that left a result has seen all trainers leave well, and is needed
    /// once more, through no fault of its own, if one of them failed at what it did afterwards. In a colocated job that waits until
    /// the trainer in the server's own pod has done what it does afterwards.
    fn early_end(&self, server: Replica, at: Timestamp, has_result: bool) -> Option<Failure> {
        let starts_again = |(trainer, pod): (_, &ObservedPod)| match pod.phase {
            PodPhase::Failed(_) | PodPhase::Pending => !self.has_left(trainer),
            PodPhase::Running => self.comes_after_the_end(trainer, pod),
            PodPhase::Succeeded { .. } => false,
        };
        let is_needed = !has_result || self.pods_of(Role::Trainer).any(starts_again);
        let trainer = Replica::trainer(server.index);
        let is_at_work = |pod: &ObservedPod| pod.phase == PodPhase::Running && !self.comes_after_the_end(trainer, pod);
        // A server that was asked to end may wait in its pod for the trainer to do so.
        let is_awaited =
            !has_result && self.live(server).is_none() || self.pod(trainer).is_some_and(is_at_work) && has_result;
        if after(at, EARLY_SERVER_END) > self.now || !is_needed || self.job.colocated && is_awaited {
            return None;
        }
        let what = if has_result {
            "had ended, as all trainers had left, before one of them failed"
        } else {
            "ended with exit code 0 although trainers still run; a server must run until they are done"
        };
        Some(Failure {
            disruption: has_result,
            exit_code: Some(0),
            reason: ENDED_EARLY.into(),
            what: what.into(),
            of_init_container: false,
            log_tail: String::new(),
            conditions: Vec::new(),
            started: None,
            at,
        })
    }

    /// The loss of a pod whose node has been silent for too long.
    fn loss(&self, pod: &ObservedPod) -> Option<Failure> {
        let since = pod.node_lost.filter(|_| !pod.ended() && self.is_lost(pod))?;
        let node = pod.node.as_deref().unwrap_or("a node");
        Some(Failure {
            disruption: true,
            exit_code: None,
            reason: "NodeLost".into(),
            what: format!("was lost with {node}, a node that has not answered since {since}"),
            of_init_container: false,
            log_tail: String::new(),
            conditions: Vec::new(),
            started: None,
            at: since,
        })
    }

    /// Returns the end of the job, if its policy ends it over a failure.
    pub(super) fn fatal_failure(&self) -> Option<End> {
        let fatal = self.failed.iter().find_map(|failed| match &failed.response.action {
            Action::FailJob { reason, because } => Some((failed, reason, because)),
            _ => None,
        });
        if let Some((Failed { replica, pod, failure, .. }, reason, because)) = fatal {
            let message = format!("{replica} (pod {}) {}, and {because}", pod.name, failure.what);
            return Some(End::new(*reason, message));
        }
        let whole_job = self.failed.iter().any(|f| f.response.counts && f.response.action == Action::RestartJob);
        let most = self.job.policy.max_restarts;
        if self.restarts_counted().saturating_add(whole_job.into()) <= most {
            return None;
        }
        let own = self.failed.iter().filter(|failed| failed.response.counts);
        let Failed { replica, pod, failure, .. } = own.min_by_key(|failed| failed.failure.at)?;
        let message = format!(
            "{replica} (pod {}) {}; spec.failurePolicy.maxRestarts is {most}, so it is not started again",
            pod.name, failure.what
        );
        Some(End::new("MaxRestartsExceeded", message))
    }
}

impl Draft<'_, '_> {
    /// Records the first failure since the job last ran well: the one that the trouble began with.
    pub(super) fn record_last_failure(&mut self) {
        let facts = self.facts;
        let own = facts.all_failed.iter().filter(|failed| !failed.response.has_other_cause);
        let Some(first) = own.min_by_key(|failed| (failed.failure.at, failed.replica)) else { return };
        let earlier =
            facts.prev.last_failure.as_ref().filter(|_| !conditions::holds(facts.prev, ConditionType::Running));
        let is_later = |known: &LastFailure| known.time.as_ref().is_some_and(|time| time.0 <= first.failure.at);
        if !earlier.is_some_and(is_later) {
            self.record_failure(first.replica, &first.pod.name, &first.failure);
        }
    }

    pub(super) fn record_failure(&mut self, replica: Replica, pod: &str, failure: &Failure) {
        self.out.status.last_failure = Some(LastFailure {
            pod: pod.to_owned(),
            role: replica.role.to_string(),
            rank: self.facts.job.rank(replica).cast_signed(),
            exit_code: failure.exit_code,
            reason: failure.reason.clone(),
            message: format!("{replica} {}", failure.what),
            log_tail: tail(&failure.log_tail, LOG_TAIL_BYTES),
            time: Some(Time(failure.at)),
        });
    }

    /// Warns of each failure that this decision counts.
    pub(super) fn report_failures(&mut self) {
        let facts = self.facts;
        for Failed { replica, pod, failure, .. } in &facts.failed {
            let failures = |history: &ReplicaHistory| history.get(*replica).map_or(0, |record| record.failures);
            if failures(&facts.history) > failures(&facts.before) {
                let note = format!(
                    "{replica} {}; it is started again (restart {} of {})",
                    failure.what,
                    facts.restarts_counted(),
                    facts.job.policy.max_restarts
                );
                self.warning("PodFailed", note, Some(pod));
            }
        }
    }
}

/// Returns what the job's policy makes of a failure of a role, or of the whole job if `role` is none.
pub(super) fn respond(job: &ValidJob, role: Option<Role>, failure: &Failure) -> Response {
    job.policy.respond_to(&psjobs_policy::Failure {
        role,
        disruption: failure.disruption,
        exit_code: failure.exit_code,
        reason: &failure.reason,
        conditions: &failure.conditions,
        log_tail: (!failure.of_init_container).then_some(failure.log_tail.as_str()),
    })
}

/// Returns what a failed pod adds to its replica's record.
fn restart_cost(job: &ValidJob, role: Role, pod: &ObservedPod, failure: &Failure) -> RestartCost {
    let Response { action, counts, .. } = respond(job, Some(role), failure);
    let in_a_row = job.policy.failures_in_a_row(pod.failures_in_a_row, failure.ran());
    // A restart of the whole job counts once, and when it is done.
    RestartCost {
        counts: counts && action != Action::RestartJob,
        in_a_row: Some(in_a_row),
        is_own: !failure.disruption && failure.exit_code != Some(PEER_AWAY),
    }
}

/// The last `bytes` of a text, from the start of a line where there is one.
fn tail(text: &str, bytes: usize) -> String {
    let cut = text.ceil_char_boundary(text.len().saturating_sub(bytes));
    let tail = &text[cut..];
    match tail.split_once('\n') {
        Some((_, lines)) if cut > 0 => lines.to_owned(),
        _ => tail.to_owned(),
    }
}
