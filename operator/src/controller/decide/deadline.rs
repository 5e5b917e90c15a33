//! Deadlines of an active job: for being active at all, for starting to run, for finding nodes, and
//! for making progress.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
pub(super) use psjobs_policy::deadlines::STALLED;
use psjobs_policy::deadlines::{FRESH_REPORT, no_step};
use psjobs_policy::{Action, Missed, Response};

use super::draft::{Draft, Wake};
use super::facts::{Facts, after};
use super::failure::respond;
use super::finish::End;
use super::phase::cause;
use crate::conditions::{self, ConditionUpdate};
use crate::controller::observe::{Failure, ObservedPod, Replica, WaitingReason};

/// Reason of the condition Created while a job that found no nodes stands back.
const SCHEDULE_TIMEOUT: &str = "ScheduleTimeout";

/// The state of a job that stands back because its pods found no nodes.
pub(super) enum Backoff {
    /// It begins, for the reason in this sentence.
    Begins(String),
    GoesOn,
}

impl Facts<'_> {
    /// Returns the end of the job if it was active, or waited for its start, for too long.
    pub(super) fn missed_deadline(&self, wake: &mut Wake) -> Option<End> {
        self.missed(self.ran_since(self.start_time()), wake)
    }

    /// Returns the end of the job if it was active for too long.
    pub(super) fn active_for_too_long(&self, wake: &mut Wake) -> Option<End> {
        self.missed(true, wake)
    }

    /// Returns the end of a job that has missed a deadline; that of the start holds for one that has not run.
    fn missed(&self, has_run: bool, wake: &mut Wake) -> Option<End> {
        let start = self.start_time();
        let active = self.now.duration_since(start).try_into().unwrap_or_default();
        let missed = match self.job.policy.deadlines.check(active, has_run) {
            Err(missed) => missed,
            Ok(next) => {
                next.map(|next| after(start, next)).into_iter().for_each(|at| wake.at(at));
                return None;
            }
        };
        let message = match missed {
            Missed::Active(_) => format!("the job {}", missed.what()),
            Missed::Startup(_) => format!("the job {}: {}", missed.what(), self.why_not_running()),
        };
        Some(End::new(missed.reason(), message))
    }

    fn why_not_running(&self) -> String {
        match self.waiting_reason() {
            Some((replica, waiting_reason)) => format!("{replica} cannot start: {}", waiting_reason.message),
            None => conditions::find(self.prev, ConditionType::Running).map(|c| c.message.clone()).unwrap_or_default(),
        }
    }

    /// Returns whether the job has run since it became active. Its condition is False since then, and only becomes False
    /// again by having been True.
    fn ran_since(&self, start: Timestamp) -> bool {
        let running = conditions::find(self.prev, ConditionType::Running);
        running.is_some_and(|running| running.status == "True" || running.last_transition_time.0 > start)
    }

    /// Returns the first pod that cannot start, and why.
    pub(super) fn waiting_reason(&self) -> Option<(Replica, &WaitingReason)> {
        let alive = self.observed.pods.iter().filter(|(replica, pod)| self.is_current(**replica, pod));
        let starting = alive.filter(|(_, pod)| pod.deletion_deadline.is_none());
        cause(starting.filter_map(|(&replica, pod)| Some((replica, pod.waiting_reason.as_ref()?))))
    }

    /// Returns whether the job stands back because its pods found no nodes: it has none until it tries again.
    pub(super) fn scheduling_backoff(&self, wake: &mut Wake) -> Option<Backoff> {
        let timeout = self.job.schedule_timeout?;
        let backoff_since = conditions::find(self.prev, ConditionType::Created)
            .filter(|created| created.reason == SCHEDULE_TIMEOUT)
            .map(|created| created.last_transition_time.0);
        if let Some(since) = backoff_since {
            return (!wake.is_over(after(since, timeout), self.now)).then_some(Backoff::GoesOn);
        }
        if self.history.done(Role::Trainer) > 0 {
            // Standing back begins anew; work that is done would be done again.
            return None;
        }
        let waiting = |pod: &ObservedPod| pod.waiting_reason.as_ref()?.unschedulable_since;
        let longest = self.pods().into_iter().filter_map(|(replica, pod)| Some((waiting(pod)?, replica))).min();
        let (_, replica) = longest.filter(|&(since, _)| wake.is_over(after(since, timeout), self.now))?;
        let seconds = timeout.as_secs();
        let message = format!(
            "{replica} found no node for {seconds} s, so all pods were deleted to free what they hold; they are created again in {seconds} s"
        );
        Some(Backoff::Begins(message))
    }

    /// The failure that a running job without progress is taken for, once its status says that it is stalled.
    pub(super) fn stalled(&self, wake: &mut Wake) -> Option<Failure> {
        let deadline = self.job.policy.deadlines.progress?;
        let since = self.last_step()?;
        let report = self.observed.progress.as_ref()?;
        if !wake.is_over(after(since, deadline), self.now) {
            return None;
        }
        if report.at.is_none_or(|at| after(at, FRESH_REPORT) <= self.now) {
            // Server 0 does not answer us; that says nothing about its steps.
            wake.at(after(self.now, SignedDuration::from_secs(10)));
            return None;
        }
        let what = no_step(deadline, report.step, report.total_steps);
        Some(Failure {
            disruption: false,
            exit_code: None,
            reason: STALLED.into(),
            what,
            of_init_container: false,
            log_tail: String::new(),
            conditions: Vec::new(),
            started: None,
            at: self.now,
        })
    }

    /// When the job last made a step while it ran; `None` if it does not run or did just now.
    fn last_step(&self) -> Option<Timestamp> {
        let phase = self.prev.phase.filter(|phase| matches!(phase, Phase::Running | Phase::Stalled))?;
        debug_assert!(!phase.is_final());
        let running = conditions::since(self.prev, ConditionType::Running)?;
        let progress = self.prev.progress.as_ref()?;
        let report = self.observed.progress.as_ref()?;
        let unchanged = i64::try_from(report.step).ok() == Some(progress.step);
        let stepped = progress.last_step_time.as_ref().map_or(running, |time| time.0);
        unchanged.then(|| running.max(stepped))
    }

    /// Returns the end of a stalled job that its policy fails, or whether starting all its pods again counts as a restart.
    pub(super) fn end_of_stall(&self, failure: &Failure) -> Result<bool, End> {
        let Response { action, counts, .. } = respond(self.job, None, failure);
        let most = self.job.policy.max_restarts;
        match action {
            Action::FailJob { reason, because } => {
                Err(End::new(reason, format!("the job {}, and {because}", failure.what)))
            }
            _ if self.prev.restarts_counted.unsigned_abs().saturating_add(counts.into()) > most => {
                let message = format!("the job {}; spec.failurePolicy.maxRestarts is {most}", failure.what);
                Err(End::new("MaxRestartsExceeded", message))
            }
            _ => Ok(counts),
        }
    }
}

impl Draft<'_, '_> {
    /// Reports that the job is stalled. The next decision, at once, does something about it.
    pub(super) fn report_stall(&mut self, failure: &Failure) {
        let message = format!("the job {}", failure.what);
        self.count();
        self.set_phase(Phase::Stalled, STALLED.to_owned());
        self.set(ConditionType::Stalled, ConditionUpdate::yes(STALLED, message.clone()));
        self.warning(STALLED, message, None);
        self.wake.at(self.facts.now);
    }

    /// Records a stall as the job's last failure, with the pod of server 0, which counts the steps.
    pub(super) fn record_stall(&mut self, failure: &Failure) {
        let server = Replica::server(0);
        let pod = self.facts.pod(server).map(|pod| pod.name.clone()).unwrap_or_default();
        self.record_failure(server, &pod, failure);
    }

    /// Deletes all pods until the job is scheduled again. `begins` says why, when that begins.
    pub(super) fn stand_back(&mut self, begins: Option<String>) {
        if let Some(message) = begins {
            self.warning(SCHEDULE_TIMEOUT, message.clone(), None);
            // As after a suspension: the next pods are new ones, and the condition's time is that of standing back.
            self.set(ConditionType::Created, ConditionUpdate::yes("Created", ""));
            self.set(ConditionType::Created, ConditionUpdate::no(SCHEDULE_TIMEOUT, message));
        }
        self.count();
        self.delete_all();
        self.forget_replicas();
        let created = conditions::find(&self.out.status, ConditionType::Created);
        let why = created.map(|created| (created.reason.clone(), created.message.clone())).unwrap_or_default();
        self.set_phase(Phase::Pending, why.0.clone());
        self.clear(ConditionType::ServersReady, &why.0);
        self.set(ConditionType::Running, ConditionUpdate::no(why.0, why.1));
    }
}
