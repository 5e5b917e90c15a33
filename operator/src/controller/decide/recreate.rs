//! A restart of the whole job: every pod is deleted, and the next ones have an incarnation that none of
//! these had. The jump of firstIncarnation and the count are one write, so it happens once.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::draft::Draft;
use crate::conditions::ConditionUpdate;

impl Draft<'_, '_> {
    /// Reports that all pods start again at `due`.
    pub(super) fn wait_for_restart(&mut self, due: Timestamp, reason: &str, what: &str) {
        self.wake.at(due);
        self.count();
        self.set_phase(Phase::Restarting, reason.to_owned());
        self.set(ConditionType::Running, ConditionUpdate::no(reason, what));
        let message = format!("{what}; all pods are started again at {due}");
        self.set(ConditionType::Restarting, ConditionUpdate::yes(reason, message));
    }

    /// Deletes all pods, and lets the next decisions create new ones.
    pub(super) fn recreate(&mut self, reason: &str, what: &str, counts: bool) {
        self.count();
        self.facts.observed.pods.values().for_each(|pod| self.delete(pod));
        // Replicas without a pod need not wait until the deleted pods are gone.
        self.wake.at(self.facts.now);
        let status = &mut self.out.status;
        status.restarts_counted = status.restarts_counted.saturating_add(counts.into());
        for (role, of_role) in [(Role::Server, &mut status.ps), (Role::Trainer, &mut status.trainer)] {
            let Some(of_role) = of_role else { continue };
            let started = self.facts.history.started(role).cast_signed();
            of_role.restarts = of_role.restarts.saturating_add(started);
            status.restarts = status.restarts.saturating_add(started);
        }
        status.progress = None;
        self.set_phase(Phase::Restarting, reason.to_owned());
        self.forget_replicas();
        self.clear(ConditionType::ServersReady, reason);
        self.set(ConditionType::Running, ConditionUpdate::no(reason, what));
        let message = format!("{what}; all pods are started again");
        self.set(ConditionType::Restarting, ConditionUpdate::yes(reason, message.clone()));
        let (counted, most) = (self.out.status.restarts_counted, self.facts.job.policy.max_restarts);
        let which = if counts { format!(" (restart {counted} of {most})") } else { String::new() };
        self.warning("JobRestarted", format!("{message}{which}"), None);
    }
}
