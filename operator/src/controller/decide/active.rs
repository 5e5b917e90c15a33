//! Decides about a job that runs or is about to: creates missing pods, replaces failed ones, and fails the job when its
//! policy says so.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::deadlines::EARLY_SERVER_END;

use super::DecisionBuilder;
use super::failure::Failed;
use crate::conditions::{self, ConditionUpdate};
use crate::controller::model::{Child, NewPod};
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

impl DecisionBuilder<'_> {
    pub(super) fn run(&mut self) {
        let restart_costs = self
            .pods()
            .into_iter()
            .map(|(replica, pod)| (replica, pod, self.restart_cost(replica, pod)))
            .collect::<Vec<_>>();
        self.history.observe(restart_costs);
        if self.prev.phase == Some(Phase::Suspended) {
            self.event("Resumed", self.resumes_from());
        }
        self.report_scaling();
        self.out.status.observed_generation = self.job.generation;
        self.out.status.start_time = self.start_time();
        self.note_certificates();
        conditions::clear(&mut self.out.status, ConditionType::Suspended, "Resumed", self.now);

        let mut failed = self.failed();
        self.record_last_failure(&failed);
        self.shrink(&mut failed);
        if let Some((reason, message)) = self.reason_to_give_up(&failed) {
            return self.fail(&reason, &message);
        }
        if self.handle_stall() || self.handle_restart_of_all(&failed) || self.renew_certificates() {
            return;
        }
        if self.in_scheduling_backoff() {
            return self.wait_for_nodes();
        }
        self.report_failures(&failed);
        self.reconcile_replicas(&failed);
        self.delete_surplus();
        self.count();
        self.report_created();
        self.report_running(&failed);
        self.report_progress();
    }

    /// Creates the pods of replicas that have none, and replaces those that failed.
    fn reconcile_replicas(&mut self, failed: &[Failed<'_>]) {
        if !self.observed.service {
            self.out.create.push(Child::Service);
        }
        for replica in self.job.replicas() {
            match self.observed.pods.get(&replica) {
                None if self.history.succeeded(replica) || self.history.is_lost(replica) => {}
                None if self.comes_too_late(replica) || self.waits_for_servers(replica) => {}
                None => {
                    let record = self.history.get(replica).unwrap_or_default();
                    self.out.create.push(Child::Pod(NewPod {
                        replica,
                        incarnation: self.history.next_incarnation(replica),
                        failures: record.failures,
                        failures_in_a_row: record.failures_in_a_row,
                    }));
                }
                Some(pod) if self.is_current(replica, pod) => self.replace_pod(replica, pod, failed),
                Some(_) => {}
            }
        }
    }

    fn resumes_from(&self) -> &'static str {
        match &self.job.object.spec.checkpoint {
            Some(checkpoint) if checkpoint.resume => "The job is started again, from its last checkpoint if it has any",
            _ => "The job is started again, from the beginning",
        }
    }

    /// Returns true for a trainer that is not to be created yet.
    pub(super) fn waits_for_servers(&self, replica: Replica) -> bool {
        self.job.policy.waits_for_servers(replica, self.history.has_begun(replica), self.servers_are_ready())
    }

    /// Deletes all pods until the job is scheduled again.
    fn wait_for_nodes(&mut self) {
        self.count();
        for pod in self.observed.pods.values() {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }
        self.forget_replicas();
        let created = conditions::find(&self.out.status, ConditionType::Created);
        let why = created.map(|created| (created.reason.clone(), created.message.clone())).unwrap_or_default();
        self.out.status.phase = Some(Phase::Pending);
        self.out.status.reason = Some(why.0.clone());
        conditions::clear(&mut self.out.status, ConditionType::ServersReady, &why.0, self.now);
        self.set(ConditionType::Running, ConditionUpdate::no(why.0, why.1));
    }

    /// Deletes a failed pod after its back-off, so that it can be replaced; until then it stays, and so do its logs.
    fn replace_pod(&mut self, replica: Replica, pod: &ObservedPod, failed: &[Failed<'_>]) {
        if pod.deletion_deadline.is_some() {
            self.delete_by_force_if_overdue(pod);
        } else if let Some(failed) = failed.iter().find(|failed| failed.replica == replica) {
            let due = self.due(failed);
            if due <= self.now {
                self.delete(pod);
            } else {
                self.wake_at(due);
            }
        } else if let (Role::Server, PodPhase::Succeeded { at, .. }) = (replica.role, &pod.phase) {
            self.wake_at(self.after(*at, EARLY_SERVER_END));
        } else if let Some(lost) = self.lost_at(pod).filter(|_| !pod.ended()) {
            self.wake_at(lost);
        }
    }

    /// When a failed pod makes way for the next.
    pub(super) fn due(&self, failed: &Failed<'_>) -> Timestamp {
        let in_a_row = self.history.get(failed.replica).map_or(0, |record| record.failures_in_a_row);
        self.after(failed.failure.at, self.job.policy.wait(in_a_row))
    }

    /// Pods that the job no longer wants: of a rank it does not have or has given up, or from before it was
    /// suspended.
    pub(super) fn delete_surplus(&mut self) {
        for (&replica, pod) in &self.observed.pods {
            if !self.is_current(replica, pod) {
                self.delete(pod);
                self.delete_by_force_if_overdue(pod);
            }
        }
    }
}
