//! A suspended job has no pods. It starts again, from its checkpoint if it has one, with incarnations that none of
//! its earlier pods had.

use psjobs_api::crd::{ConditionType, Phase};

use super::draft::Draft;
use crate::conditions::ConditionUpdate;

impl Draft<'_, '_> {
    /// Resets the history of all replicas: their next pods begin anew, whatever their pods did so far.
    pub(super) fn forget_replicas(&mut self) {
        let status = &mut self.out.status;
        status.first_incarnation = self.facts.history.after_all().cast_signed();
        status.certificates = self.facts.job.new_certificates(status.first_incarnation);
        status.certificates_expire = None;
        for of_role in [&mut status.ps, &mut status.trainer].into_iter().flatten() {
            of_role.replicas = Vec::new();
            of_role.succeeded = 0;
            of_role.lost = 0;
        }
        self.clear(ConditionType::Shrunk, "Recalled");
    }

    pub(super) fn suspend(&mut self) {
        self.count();
        self.delete_all();

        const REASON: &str = "Suspended";
        self.forget_replicas();
        self.set_phase(Phase::Suspended, REASON.to_owned());
        let status = &mut self.out.status;
        status.observed_generation = self.facts.job.generation;
        status.start_time = None;
        status.progress = None;
        status.recreations_in_a_row = 0;
        for type_ in [
            ConditionType::Created,
            ConditionType::ServersReady,
            ConditionType::Running,
            ConditionType::Restarting,
            ConditionType::Stalled,
            ConditionType::CheckpointFailing,
            ConditionType::Completing,
        ] {
            self.clear(type_, REASON);
        }
        let message = "spec.suspend is true; set it to false to start the job again";
        self.set(ConditionType::Suspended, ConditionUpdate::yes(REASON, message));
        if self.facts.prev.phase != Some(Phase::Suspended) {
            self.event(REASON, "The job is suspended; its pods are deleted");
        }
    }
}
