//! A job that runs or is on its way there: create what is missing, replace what failed, and give up
//! when the job's policy says so.

use jiff::SignedDuration;
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::failure::{EARLY_SERVER_END, Failed, failure};
use super::{Child, Draft, conditions};
use crate::controller::observe::{Life, ObservedPod, Replica};

impl Draft<'_> {
    pub(super) fn run(&mut self) {
        self.ledger.observe(self.pods(), |replica, pod| {
            failure(replica, pod, self.now).is_some_and(|failure| !failure.disruption)
        });
        if self.prev.phase == Some(Phase::Suspended) {
            self.notice("Resumed", "The job is started again, from the beginning");
        }
        self.out.status.observed_generation = self.job.generation;
        self.out.status.start_time = self.prev.start_time.clone().or(self.time());
        conditions::clear(&mut self.out.status, ConditionType::Suspended, "Resumed", self.now);

        let failed = self.failed();
        self.record_last_failure(&failed);
        if let Some((reason, message)) = self.reason_to_give_up(&failed) {
            return self.fail(&reason, &message);
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
                None if self.ledger.succeeded(replica) => {}
                None => self.out.create.push(Child::Pod {
                    replica,
                    incarnation: self.ledger.next_incarnation(replica),
                    failures: self.ledger.get(replica).map_or(0, |record| record.failures),
                }),
                Some(pod) if self.is_current(replica, pod) => self.make_way(replica, pod, failed),
                Some(_) => {}
            }
        }
    }

    /// Deletes a failed pod after its back-off; until then it stays, and so do its logs.
    fn make_way(&mut self, replica: Replica, pod: &ObservedPod, failed: &[Failed<'_>]) {
        if pod.gone_by.is_some() {
            self.delete_by_force_if_overdue(pod);
        } else if let Some(failed) = failed.iter().find(|failed| failed.replica == replica) {
            let due = self.after(failed.failure.at, back_off(pod.incarnation));
            if due <= self.now {
                self.delete(pod);
            } else {
                self.wake_at(due);
            }
        } else if let (Role::Server, Life::Succeeded { at, .. }) = (replica.role, &pod.life) {
            self.wake_at(self.after(*at, EARLY_SERVER_END));
        }
    }

    /// Pods that the job no longer wants: of a rank it does not have, or from before it was suspended.
    fn delete_surplus(&mut self) {
        for (&replica, pod) in &self.world.pods {
            if !self.is_current(replica, pod) {
                self.delete(pod);
                self.delete_by_force_if_overdue(pod);
            }
        }
    }
}

/// Before the pod after incarnation `n` of a replica: 0, 1, 2, 4, ... 60 s.
fn back_off(incarnation: u32) -> SignedDuration {
    let seconds = incarnation.checked_sub(1).map_or(0, |doublings| 1_i64 << doublings.min(6));
    SignedDuration::from_secs(seconds.min(60))
}
