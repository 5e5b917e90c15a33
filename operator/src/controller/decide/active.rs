//! A job that runs or is on its way there: create what is missing, replace what failed, and give up
//! when the job's policy says so.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::deadlines::EARLY_SERVER_END;

use super::conditions::Verdict;
use super::failure::Failed;
use super::{Child, Draft, NewPod, conditions};
use crate::controller::observe::{Life, ObservedPod, Replica};

impl Draft<'_> {
    pub(super) fn run(&mut self) {
        let tolls =
            self.pods().into_iter().map(|(replica, pod)| (replica, pod, self.toll(replica, pod))).collect::<Vec<_>>();
        self.ledger.observe(tolls);
        if self.prev.phase == Some(Phase::Suspended) {
            self.notice("Resumed", self.resumes_from());
        }
        self.tell_scaling();
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
        if self.stands_back() {
            return self.wait_for_nodes();
        }
        self.tell_failures(&failed);
        self.heal(&failed);
        self.delete_surplus();
        self.count();
        self.report_created();
        self.report_running(&failed);
        self.report_progress();
    }

    /// Makes every replica have one pod that runs or is about to.
    fn heal(&mut self, failed: &[Failed<'_>]) {
        if !self.world.service {
            self.out.create.push(Child::Service);
        }
        for replica in self.job.replicas() {
            match self.world.pods.get(&replica) {
                None if self.ledger.succeeded(replica) || self.ledger.is_lost(replica) => {}
                None if self.comes_too_late(replica) || self.waits_for_servers(replica) => {}
                None => {
                    let record = self.ledger.get(replica).unwrap_or_default();
                    self.out.create.push(Child::Pod(NewPod {
                        replica,
                        incarnation: self.ledger.next_incarnation(replica),
                        failures: record.failures,
                        failures_in_a_row: record.failures_in_a_row,
                    }));
                }
                Some(pod) if self.is_current(replica, pod) => self.make_way(replica, pod, failed),
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
        self.job.policy.waits_for_servers(replica, self.ledger.has_begun(replica), self.servers_are_ready())
    }

    /// No pods until the next try.
    fn wait_for_nodes(&mut self) {
        self.count();
        for pod in self.world.pods.values() {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }
        self.forget_replicas();
        let created = conditions::find(&self.out.status, ConditionType::Created);
        let why = created.map(|created| (created.reason.clone(), created.message.clone())).unwrap_or_default();
        self.out.status.phase = Some(Phase::Pending);
        self.out.status.reason = Some(why.0.clone());
        conditions::clear(&mut self.out.status, ConditionType::ServersReady, &why.0, self.now);
        self.set(ConditionType::Running, Verdict::no(why.0, why.1));
    }

    /// Deletes a failed pod after its back-off; until then it stays, and so do its logs.
    fn make_way(&mut self, replica: Replica, pod: &ObservedPod, failed: &[Failed<'_>]) {
        if pod.gone_by.is_some() {
            self.delete_by_force_if_overdue(pod);
        } else if let Some(failed) = failed.iter().find(|failed| failed.replica == replica) {
            let due = self.due(failed);
            if due <= self.now {
                self.delete(pod);
            } else {
                self.wake_at(due);
            }
        } else if let (Role::Server, Life::Succeeded { at, .. }) = (replica.role, &pod.life) {
            self.wake_at(self.after(*at, EARLY_SERVER_END));
        } else if let Some(lost) = self.lost_at(pod).filter(|_| !pod.ended()) {
            self.wake_at(lost);
        }
    }

    /// When a failed pod makes way for the next.
    pub(super) fn due(&self, failed: &Failed<'_>) -> Timestamp {
        let in_a_row = self.ledger.get(failed.replica).map_or(0, |record| record.failures_in_a_row);
        self.after(failed.failure.at, self.job.policy.wait(in_a_row))
    }

    /// Pods that the job no longer wants: of a rank it does not have or has given up, or from before it was
    /// suspended.
    pub(super) fn delete_surplus(&mut self) {
        for (&replica, pod) in &self.world.pods {
            if !self.is_current(replica, pod) {
                self.delete(pod);
                self.delete_by_force_if_overdue(pod);
            }
        }
    }
}
