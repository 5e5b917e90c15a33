//! The end of a job. Completing waits for the servers. Succeeded and Failed are final: the condition is written first, then
//! pods are deleted, and nothing is created again.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_api::crd::{CleanPodPolicy, ConditionType, Phase};

use super::timing::COMPLETING_DEBOUNCE;
use super::{DecisionBuilder, counted};
use crate::conditions::{self, ConditionUpdate};
use crate::controller::model::Event;
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

impl DecisionBuilder<'_> {
    /// Completes a job whose trainers are done: waits until the servers end by themselves, or their time is over.
    pub(super) fn complete(&mut self) {
        self.history.observe(self.pods_without_restart_cost());
        self.out.status.observed_generation = self.job.generation;
        self.out.status.start_time = self.start_time();
        self.count();
        self.report_results();
        self.stop_the_rest();

        let known = conditions::since(self.prev, ConditionType::Completing);
        let since = known.unwrap_or_else(|| self.trainers_done_at());
        let deadline = self.after(since, self.job.server_drain);
        let servers_ended = self.pods_of(Role::Server).all(|(_, pod)| pod.ended() || !pod.alive);
        if servers_ended || deadline <= self.now {
            return self.succeed(servers_ended);
        }
        // The servers wait for these trainers.
        self.delete_surplus();
        self.wake_at(deadline);
        if known.is_none() {
            self.event("Completing", "All trainers are done; waiting for the servers to end");
        }
        self.out.transient_for = Some(COMPLETING_DEBOUNCE);
        self.out.status.phase = Some(Phase::Completing);
        self.out.status.reason = Some("WaitingForServers".into());
        let seconds = self.job.server_drain.as_secs();
        let message = format!("all trainers are done; the servers have {seconds} s to end");
        let completing = ConditionUpdate::yes("TrainersSucceeded", message);
        conditions::set(&mut self.out.status, ConditionType::Completing, completing, since);
        self.set(ConditionType::Running, ConditionUpdate::no("TrainersSucceeded", "all trainers are done"));
        conditions::clear(&mut self.out.status, ConditionType::Restarting, "TrainersSucceeded", self.now);
    }

    /// Returns when the last trainer ended. The servers' time begins then, although the condition may be written some seconds
    /// later.
    fn trainers_done_at(&self) -> Timestamp {
        let ended = self.pods_of(Role::Trainer).filter_map(|(_, pod)| match pod.phase {
            PodPhase::Succeeded { at, .. } => Some(at),
            _ => None,
        });
        ended.max().map_or(self.now, |at| self.lately(at))
    }

    /// Trainers whose success is not waited for, and then the servers, which wait for all of them. Those of an
    /// elastic job only wait for who is there, so they end by themselves.
    fn stop_the_rest(&mut self) {
        let rest = |(replica, pod): &(Replica, &ObservedPod)| {
            replica.role == Role::Trainer && pod.alive && !matches!(pod.phase, PodPhase::Succeeded { .. })
        };
        if self.history.done(Role::Trainer) >= self.job.trainers {
            return;
        }
        let trainers = self.pods().into_iter().filter(rest).map(|(_, pod)| pod).collect::<Vec<_>>();
        let servers = self.pods_of(Role::Server).map(|(_, pod)| pod).filter(|pod| pod.alive).collect();
        for pod in if trainers.is_empty() && self.job.policy.elastic.is_none() { servers } else { trainers } {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }
    }

    fn succeed(&mut self, servers_ended: bool) {
        let trouble = self.pods_of(Role::Server).find_map(|(replica, pod)| match &pod.phase {
            PodPhase::Failed(failure) => Some(format!("; {replica} {} at the end", failure.what)),
            _ => None,
        });
        let trouble = match trouble {
            _ if !servers_ended => {
                "; the servers did not end within spec.runPolicy.serverDrainSeconds and were stopped".into()
            }
            trouble => trouble.unwrap_or_default(),
        };
        let message = format!("{} ended well{trouble}", counted(self.history.done(Role::Trainer), "trainer"));
        self.finish(Phase::Succeeded, ConditionType::Succeeded, "TrainersSucceeded", &message);
    }

    pub(super) fn fail(&mut self, reason: &str, message: &str) {
        self.count();
        self.finish(Phase::Failed, ConditionType::Failed, reason, message);
    }

    fn finish(&mut self, phase: Phase, condition: ConditionType, reason: &str, message: &str) {
        self.out.status.phase = Some(phase);
        self.out.status.reason = Some(reason.into());
        self.out.status.completion_time = self.time();
        for type_ in [ConditionType::ServersReady, ConditionType::Running] {
            self.set(type_, ConditionUpdate::no(reason, "the job is finished"));
        }
        for type_ in [ConditionType::Restarting, ConditionType::Stalled, ConditionType::Completing] {
            conditions::clear(&mut self.out.status, type_, reason, self.now);
        }
        self.set(condition, ConditionUpdate::yes(reason, message));
        let note = format!("The job has {}: {message}", if phase == Phase::Failed { "failed" } else { "succeeded" });
        let warning = phase == Phase::Failed;
        self.out.events.push(Event { warning, reason: format!("{phase:?}"), note, pod: None });
        self.wake = None;
        self.clean_up();
    }

    /// Cleans up after the end: deletes pods as the policy says, and the job when its time is over.
    pub(super) fn clean_up(&mut self) {
        for (replica, pod) in &self.observed.pods {
            let unwanted = match self.job.clean_pod_policy {
                CleanPodPolicy::All => true,
                CleanPodPolicy::Running => pod.alive,
                CleanPodPolicy::None => pod.alive && replica.role == Role::Server,
            };
            if pod.deletion_deadline.is_some() {
                self.delete_by_force_if_overdue(pod);
            } else if unwanted {
                self.delete(pod);
            }
        }
        self.count_what_is_left();
        let end = self.out.status.completion_time.as_ref().map(|time| time.0);
        if let (Some(end), Some(ttl)) = (end, self.job.ttl_after_finished) {
            let due = self.after(end, ttl);
            self.out.delete_job = due <= self.now;
            if !self.out.delete_job {
                self.wake_at(due);
            }
        }
    }
}
