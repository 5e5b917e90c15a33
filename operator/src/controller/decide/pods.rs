//! The pods of a job that runs: missing ones are created, failed ones make way for the next, and those that the job does not
//! want are deleted.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_policy::deadlines::EARLY_SERVER_END;

use super::draft::Draft;
use super::facts::{Facts, Failed, after};
use crate::controller::model::{Child, ColocatedServer, NewPod};
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

impl Facts<'_> {
    /// Returns when a failed pod makes way for the next.
    pub(super) fn due(&self, failed: &Failed<'_>) -> Timestamp {
        let in_a_row = self.history.get(failed.replica).map_or(0, |record| record.failures_in_a_row);
        after(failed.failure.at, self.job.policy.wait(in_a_row))
    }

    /// Returns the next pod of a replica that has none.
    fn next_pod(&self, replica: Replica) -> NewPod {
        let record = self.history.get(replica).unwrap_or_default();
        NewPod {
            replica,
            incarnation: self.history.next_incarnation(replica),
            failures: record.failures,
            failures_in_a_row: record.failures_in_a_row,
            failed_incarnation: record.failed_incarnation,
            finished_trainers: self.finished_for(replica.role),
            closing: self.closing,
            server: None,
        }
    }

    /// Returns the next pod of a server and the trainer of its number. Both have the incarnation that neither had.
    fn next_colocated_pod(&self, index: u32) -> NewPod {
        let (server, trainer) = (self.next_pod(Replica::server(index)), self.next_pod(Replica::trainer(index)));
        NewPod {
            incarnation: trainer.incarnation.max(server.incarnation),
            finished_trainers: server.finished_trainers,
            server: Some(ColocatedServer {
                failures: server.failures,
                failures_in_a_row: server.failures_in_a_row,
                failed_incarnation: server.failed_incarnation,
                is_alone: self.history.succeeded(trainer.replica),
            }),
            ..trainer
        }
    }
}

impl Draft<'_, '_> {
    /// Creates the pods of replicas that have none, and replaces those that failed.
    pub(super) fn reconcile_replicas(&mut self) {
        let facts = self.facts;
        if !facts.observed.service {
            self.out.create.push(Child::Service);
        }
        if facts.job.colocated {
            return self.reconcile_colocated();
        }
        for replica in facts.job.replicas() {
            match facts.observed.pods.get(&replica) {
                None if facts.history.succeeded(replica) || facts.history.is_lost(replica) => {}
                None if facts.comes_too_late(replica) || facts.waits_for_servers(replica) => {}
                None => self.out.create.push(Child::Pod(facts.next_pod(replica))),
                Some(pod) if facts.is_current(replica, pod) => self.replace_pod(replica, pod),
                Some(_) => {}
            }
        }
    }

    /// Creates the pods that are missing, each with a server and its trainer, and replaces those in which one of the two failed. A
    /// trainer that is done needs no pod, but its server does as long as the job runs.
    fn reconcile_colocated(&mut self) {
        let facts = self.facts;
        for index in 0..facts.job.trainers {
            let pair = [Replica::server(index), Replica::trainer(index)];
            let pods = pair.map(|replica| facts.observed.pods.get(&replica));
            if pods == [None, None] {
                self.out.create.push(Child::Pod(facts.next_colocated_pod(index)));
            }
            for (replica, pod) in pair.into_iter().zip(pods) {
                if let Some(pod) = pod.filter(|pod| facts.is_current(replica, pod)) {
                    self.replace_pod(replica, pod);
                }
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
