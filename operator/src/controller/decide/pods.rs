//! The pods of a job that runs: missing ones are created, failed ones make way for the next, and those that the job does not
//! want are deleted.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_policy::deadlines::EARLY_SERVER_END;

use super::draft::Draft;
use super::facts::{Facts, Failed, after};
use crate::controller::model::{Child, NewPod};
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

impl Facts<'_> {
    /// Returns when a failed pod makes way for the next.
    pub(super) fn due(&self, failed: &Failed<'_>) -> Timestamp {
        let in_a_row = self.history.get(failed.replica).map_or(0, |record| record.failures_in_a_row);
        after(failed.failure.at, self.job.policy.wait(in_a_row))
    }
}

impl Draft<'_, '_> {
    /// Creates the pods of replicas that have none, and replaces those that failed.
    pub(super) fn reconcile_replicas(&mut self) {
        let facts = self.facts;
        if !facts.observed.service {
            self.out.create.push(Child::Service);
        }
        for replica in facts.job.replicas() {
            match facts.observed.pods.get(&replica) {
                None if facts.history.succeeded(replica) || facts.history.is_lost(replica) => {}
                None if facts.comes_too_late(replica) || facts.waits_for_servers(replica) => {}
                None => {
                    let record = facts.history.get(replica).unwrap_or_default();
                    self.out.create.push(Child::Pod(NewPod {
                        replica,
                        incarnation: facts.history.next_incarnation(replica),
                        failures: record.failures,
                        failures_in_a_row: record.failures_in_a_row,
                        failed_incarnation: record.failed_incarnation,
                        finished_trainers: facts.finished_for(replica.role),
                        closing: facts.closing,
                    }));
                }
                Some(pod) if facts.is_current(replica, pod) => self.replace_pod(replica, pod),
                Some(_) => {}
            }
        }
    }

    /// Deletes a failed pod after its back-off, so that it can be replaced; until then it stays, and so do its logs.
    fn replace_pod(&mut self, replica: Replica, pod: &ObservedPod) {
        let facts = self.facts;
        if pod.deletion_deadline.is_some() {
            self.delete_by_force_if_overdue(pod);
        } else if let Some(failed) = facts.failed.iter().find(|failed| failed.replica == replica) {
            if self.wake.is_over(facts.due(failed), facts.now) {
                self.delete(pod);
            }
        } else if let (Role::Server, PodPhase::Succeeded { at, .. }) = (replica.role, &pod.phase) {
            self.wake.is_over(after(*at, EARLY_SERVER_END), facts.now);
        } else if let Some(lost) = facts.lost_at(pod).filter(|_| !pod.ended()) {
            self.wake.at(lost);
        }
    }

    /// Deletes pods that the job no longer wants: of a rank that it does not have or has given up, or from before it was
    /// suspended.
    pub(super) fn delete_surplus(&mut self) {
        for (&replica, pod) in &self.facts.observed.pods {
            if !self.facts.is_current(replica, pod) {
                self.delete(pod);
                self.delete_by_force_if_overdue(pod);
            }
        }
    }
}
