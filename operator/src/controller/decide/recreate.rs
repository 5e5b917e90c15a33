//! A restart of the whole job: every pod is deleted, and the next ones have an incarnation that none of
//! these had. The jump of firstIncarnation and the count are one write, so it happens once.

use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::Action;

use super::DecisionBuilder;
use super::failure::Failed;
use crate::conditions::{self, ConditionUpdate};

impl DecisionBuilder<'_> {
    /// Starts all pods again if a failure wants that, after the back-off. Whether there is nothing else
    /// to do now.
    pub(super) fn handle_restart_of_all(&mut self, failed: &[Failed<'_>]) -> bool {
        let of_all = || failed.iter().filter(|failed| failed.response.action == Action::RestartJob);
        let Some(first) = of_all().min_by_key(|failed| (failed.failure.at, failed.replica)) else { return false };
        let Failed { replica, failure, .. } = first;
        let in_a_row = self.recreations_in_a_row(first);
        let due = self.after(failure.at, self.job.policy.wait(in_a_row));
        let what = format!("{replica} {}", failure.what);
        if due > self.now {
            self.wake_at(due);
            self.count();
            self.out.status.phase = Some(Phase::Restarting);
            self.out.status.reason = Some(failure.reason.clone());
            self.set(ConditionType::Running, ConditionUpdate::no(failure.reason.clone(), what.clone()));
            let message = format!("{what}; all pods are started again at {due}");
            self.set(ConditionType::Restarting, ConditionUpdate::yes(failure.reason.clone(), message));
            return true;
        }
        self.out.status.recreations_in_a_row = in_a_row.cast_signed();
        let counts = of_all().any(|failed| failed.response.counts);
        let reason = failure.reason.clone();
        self.recreate(&reason, &what, counts);
        true
    }

    /// Returns the number of restarts of the whole job in a row, this one included.
    fn recreations_in_a_row(&self, first: &Failed<'_>) -> u32 {
        self.job.policy.failures_in_a_row(self.prev.recreations_in_a_row.unsigned_abs(), first.failure.ran())
    }

    /// Deletes all pods, and lets the next decisions create new ones.
    pub(super) fn recreate(&mut self, reason: &str, what: &str, counts: bool) {
        self.count();
        for pod in self.observed.pods.values() {
            self.delete(pod);
        }
        // Replicas without a pod need not wait until the deleted pods are gone.
        self.wake_at(self.now);
        let status = &mut self.out.status;
        status.restarts_counted += i32::from(counts);
        for (role, of_role) in [(Role::Server, &mut status.ps), (Role::Trainer, &mut status.trainer)] {
            let Some(of_role) = of_role else { continue };
            let started = self.history.started(role).cast_signed();
            of_role.restarts += started;
            status.restarts += started;
        }
        status.progress = None;
        status.phase = Some(Phase::Restarting);
        status.reason = Some(reason.into());
        self.forget_replicas();
        conditions::clear(&mut self.out.status, ConditionType::ServersReady, reason, self.now);
        self.set(ConditionType::Running, ConditionUpdate::no(reason, what));
        let message = format!("{what}; all pods are started again");
        self.set(ConditionType::Restarting, ConditionUpdate::yes(reason, message.clone()));
        let (counted, most) = (self.out.status.restarts_counted, self.job.policy.max_restarts);
        let which = if counts { format!(" (restart {counted} of {most})") } else { String::new() };
        self.warning("JobRestarted", format!("{message}{which}"), None);
    }
}
