//! Deadlines of an active job: for being active at all, for starting to run, for finding nodes, and
//! for making progress.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::deadlines::{FRESH_REPORT, STALLED, no_step};
use psjobs_policy::{Action, Missed, Response};

use super::DecisionBuilder;
use super::conditions::{self, ConditionUpdate};
use super::failure::respond;
use super::phase::cause;
use crate::controller::observe::{Failure, Replica, WaitingReason};

/// Reason of the condition Created while a job that found no nodes stands back.
const SCHEDULE_TIMEOUT: &str = "ScheduleTimeout";

impl DecisionBuilder<'_> {
    /// Returns reason and sentence if the job was active, or waited for its start, for too long.
    pub(super) fn missed_deadline(&mut self) -> Option<(String, String)> {
        let start = self.out.status.start_time.as_ref()?.0;
        let active = self.now.duration_since(start).try_into().unwrap_or_default();
        let missed = match self.job.policy.deadlines.check(active, self.ran_since(start)) {
            Err(missed) => missed,
            Ok(next) => {
                next.map(|next| self.after(start, next)).into_iter().for_each(|at| self.wake_at(at));
                return None;
            }
        };
        let message = match missed {
            Missed::Active(_) => format!("the job {}", missed.what()),
            Missed::Startup(_) => format!("the job {}: {}", missed.what(), self.why_not_running()),
        };
        Some((missed.reason().into(), message))
    }

    fn why_not_running(&self) -> String {
        match self.waiting_reason() {
            Some((replica, waiting_reason)) => format!("{replica} cannot start: {}", waiting_reason.message),
            None => conditions::find(self.prev, ConditionType::Running).map(|c| c.message.clone()).unwrap_or_default(),
        }
    }

    /// Returns true if `duration` has passed since `start`; if not, looks again when it has.
    fn is_over(&mut self, start: Timestamp, duration: impl TryInto<SignedDuration>) -> bool {
        let end = self.after(start, duration);
        if end > self.now {
            self.wake_at(end);
        }
        end <= self.now
    }

    /// Returns whether the job has run since it became active. Its condition was set to False then, and later
    /// only becomes False again by having been True.
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
    pub(super) fn in_scheduling_backoff(&mut self) -> bool {
        let Some(timeout) = self.job.schedule_timeout else { return false };
        let backoff_since = conditions::find(self.prev, ConditionType::Created)
            .filter(|created| created.reason == SCHEDULE_TIMEOUT)
            .map(|created| created.last_transition_time.0);
        if let Some(since) = backoff_since {
            return !self.is_over(since, timeout);
        }
        if self.history.done(Role::Trainer) > 0 {
            // Standing back begins anew; work that is done would be done again.
            return false;
        }
        let waiting = |pod: &super::ObservedPod| pod.waiting_reason.as_ref()?.unschedulable_since;
        let longest = self.pods().into_iter().filter_map(|(replica, pod)| Some((waiting(pod)?, replica))).min();
        let Some((_, replica)) = longest.filter(|&(since, _)| self.is_over(since, timeout)) else { return false };
        let seconds = timeout.as_secs();
        let message = format!(
            "{replica} found no node for {seconds} s, so all pods were deleted to free what they hold; they are created again in {seconds} s"
        );
        self.warning(SCHEDULE_TIMEOUT, message.clone(), None);
        // As after a suspension: the next pods are new ones, and the condition's time is that of standing back.
        self.set(ConditionType::Created, ConditionUpdate::yes("Created", ""));
        self.set(ConditionType::Created, ConditionUpdate::no(SCHEDULE_TIMEOUT, message));
        true
    }

    /// The failure that a running job without progress is taken for, once its status says that it is stalled.
    pub(super) fn stalled(&mut self) -> Option<Failure> {
        let deadline = self.job.policy.deadlines.progress?;
        let since = self.last_step()?;
        let report = self.observed.progress.as_ref()?;
        if !self.is_over(since, deadline) {
            return None;
        }
        if report.at.is_none_or(|at| self.after(at, FRESH_REPORT) <= self.now) {
            // Server 0 does not answer us; that says nothing about its steps.
            self.wake_at(self.after(self.now, SignedDuration::from_secs(10)));
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

    /// Tells that the job is stalled, and in the next decision does something about it. Whether there
    /// is nothing else to do now.
    pub(super) fn handle_stall(&mut self) -> bool {
        let Some(failure) = self.stalled() else {
            conditions::clear(&mut self.out.status, ConditionType::Stalled, "Progress", self.now);
            return false;
        };
        if self.prev.phase != Some(Phase::Stalled) {
            let message = format!("the job {}", failure.what);
            self.count();
            self.out.status.phase = Some(Phase::Stalled);
            self.out.status.reason = Some(STALLED.into());
            self.set(ConditionType::Stalled, ConditionUpdate::yes(STALLED, message.clone()));
            self.warning(STALLED, message, None);
            self.wake_at(self.now);
            return true;
        }
        let server = Replica::server(0);
        let pod = self.pod(server).map(|pod| pod.name.clone()).unwrap_or_default();
        self.record_failure(server, &pod, &failure);
        let Response { action, counts } = respond(self.job, None, &failure);
        let counted = self.prev.restarts_counted.unsigned_abs() + u32::from(counts);
        let most = self.job.policy.max_restarts;
        match action {
            Action::FailJob { reason, because } => {
                self.fail(reason, &format!("the job {}, and {because}", failure.what));
            }
            _ if counted > most => {
                let message = format!("the job {}; spec.failurePolicy.maxRestarts is {most}", failure.what);
                self.fail("MaxRestartsExceeded", &message);
            }
            _ => self.recreate(STALLED, &format!("the job {}", failure.what), counts),
        }
        true
    }
}
