//! A suspended job has no pods. It starts again, from its checkpoint if it has one, with incarnations that none of
//! its earlier pods had.

use psjobs_api::crd::{ConditionType, Phase};

use super::{DecisionBuilder, ReplicaHistory};
use crate::conditions::{self, ConditionUpdate};

impl DecisionBuilder<'_> {
    /// Resets the history of all replicas: their next pods begin anew, whatever their pods did so far.
    pub(super) fn forget_replicas(&mut self) {
        self.out.status.first_incarnation = self.history.after_all().cast_signed();
        self.history = ReplicaHistory::default();
        self.out.status.certificates = self.job.new_certificates(self.out.status.first_incarnation);
        let status = &mut self.out.status;
        status.certificates_expire = None;
        for of_role in [&mut status.ps, &mut status.trainer].into_iter().flatten() {
            of_role.replicas = Vec::new();
            of_role.succeeded = 0;
            of_role.lost = 0;
        }
        conditions::clear(status, ConditionType::Shrunk, "Recalled", self.now);
    }

    pub(super) fn suspend(&mut self) {
        self.history.observe(self.pods_without_restart_cost());
        self.count();
        for pod in self.observed.pods.values() {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }

        const REASON: &str = "Suspended";
        self.forget_replicas();
        let status = &mut self.out.status;
        status.observed_generation = self.job.generation;
        status.phase = Some(Phase::Suspended);
        status.reason = Some(REASON.into());
        status.start_time = None;
        status.progress = None;
        status.recreations_in_a_row = 0;
        for type_ in [
            ConditionType::Created,
            ConditionType::ServersReady,
            ConditionType::Running,
            ConditionType::Restarting,
            ConditionType::Stalled,
            ConditionType::Completing,
        ] {
            conditions::clear(status, type_, REASON, self.now);
        }
        let message = "spec.suspend is true; set it to false to start the job again";
        self.set(ConditionType::Suspended, ConditionUpdate::yes(REASON, message));
        if self.prev.phase != Some(Phase::Suspended) {
            self.event(REASON, "The job is suspended; its pods are deleted");
        }
    }
}
