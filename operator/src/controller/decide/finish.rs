//! The end of a job. Completing waits for the servers. Succeeded and Failed are final: the condition is written first, then
//! pods are deleted, and nothing is created again.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::Role;
use psjobs_api::crd::{CleanPodPolicy, ConditionType, Phase};
use psjobs_policy::Success;
use psjobs_policy::deadlines::{FRESH_REPORT, NEVER_TRAINED, NO_MODEL};

use super::draft::{Draft, Wake, counted};
use super::facts::{Facts, after};
use super::timing::COMPLETING_DEBOUNCE;
use crate::conditions::{self, ConditionUpdate};
use crate::controller::model::Event;
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

/// The reason of a job's end, one word and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub reason: String,
    pub message: String,
}

impl End {
    pub fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

impl Facts<'_> {
    /// Success so far: the main containers of as many trainers as the job asks for have ended well, now or
    /// earlier, or the work of an elastic job is done. A job that completes goes on completing.
    pub(super) fn trainers_are_done(&self) -> bool {
        let policy = &self.job.policy;
        self.prev.phase == Some(Phase::Completing)
            || policy.success.is_reached(self.job.trainers, |index| self.is_done(Replica::trainer(index)))
            || policy.success != Success::RankZero && self.work_is_over(|trainer| self.is_done(trainer))
    }

    fn is_done(&self, trainer: Replica) -> bool {
        let ended_well = |pod: &ObservedPod| matches!(pod.phase, PodPhase::Succeeded { .. });
        self.before.succeeded(trainer) || self.pod(trainer).is_some_and(ended_well) || self.has_left(trainer)
    }

    /// Returns whether server 0 has to write the model, or may have written it and has not reported it: the trainers of
    /// a job with checkpoints are done, all of them, or the members of an elastic job.
    fn awaits_the_model(&self) -> bool {
        let all = || (0..self.job.trainers).all(|index| self.is_done(Replica::trainer(index)));
        self.job.object.spec.checkpoint.is_some()
            && self.prev.model.is_none()
            && (self.job.policy.elastic.is_some() || all())
    }

    /// Returns whether the job cannot end yet, because server 0 has failed or is lost before it reported the model. A
    /// new one finds all that it needs in the last checkpoint.
    pub(super) fn lacks_the_model(&self) -> bool {
        self.awaits_the_model()
            && self.pod(Replica::server(0)).is_none_or(|pod| match pod.phase {
                PodPhase::Failed(_) => true,
                PodPhase::Succeeded { .. } => false,
                PodPhase::Running | PodPhase::Pending => pod.deletion_deadline.is_some() || self.is_lost(pod),
            })
    }

    /// Returns whether the job is suspended while server 0 still has the model to write. Other jobs whose trainers are done
    /// end in a moment by themselves.
    pub(super) fn is_suspended_before_the_model(&self) -> bool {
        let server = self.pod(Replica::server(0));
        self.job.suspended && self.awaits_the_model() && server.is_some_and(|pod| !pod.ended())
    }

    /// Returns whether the trainers made a step, as far as the status, server 0 and the trainers' results say.
    fn has_trained(&self) -> bool {
        let known = self.prev.progress.as_ref().is_some_and(|known| known.step > 0);
        let reported = self.observed.progress.as_ref().is_some_and(|report| report.step > 0);
        let mut results = self.pods_of(Role::Trainer).filter_map(|(_, pod)| pod.result());
        known || reported || self.prev.last_checkpoint.is_some() || results.any(|result| result.steps > 0)
    }

    /// Returns whether server 0 says now how many steps were made. One that took the place of another is not asked: it may have
    /// its steps still to read.
    fn counts_steps(&self) -> bool {
        let server = Replica::server(0);
        let is_first = self.pod(server).is_some_and(|pod| pod.incarnation == self.history.since(server));
        let reported = self.observed.progress.as_ref().and_then(|report| report.at);
        let is_fresh = reported.is_some_and(|at| after(at, FRESH_REPORT) > self.now);
        is_first && is_fresh
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
}

impl Draft<'_, '_> {
    /// Completes a job whose trainers are done: waits until the servers end by themselves, or their time is over. Server 0 has
    /// the time that it needs to write the model.
    pub(super) fn complete(&mut self) {
        let facts = self.facts;
        self.note_start();
        self.count();
        self.report_results();
        self.stop_the_rest();

        let known = conditions::since(facts.prev, ConditionType::Completing);
        let since = known.unwrap_or_else(|| facts.trainers_done_at());
        let deadline = after(since, facts.job.server_drain);
        let servers_ended = facts.pods_of(Role::Server).all(|(_, pod)| pod.ended() || !pod.alive);
        let writer = facts.pod(Replica::server(0)).filter(|pod| !pod.ended() && facts.awaits_the_model());
        if servers_ended || (deadline <= facts.now && writer.is_none()) {
            return self.succeed(servers_ended);
        }
        // Nothing else limits how long server 0 may take for the model.
        if let Some(end) = writer.and_then(|_| facts.active_for_too_long(&mut self.wake)) {
            return self.fail(&end);
        }
        // Only server 0 still runs then, and has the model to write.
        if deadline <= facts.now && !facts.has_trained() {
            if facts.counts_steps() {
                return self.fail(&End::new(NEVER_TRAINED, format!("the job {NO_MODEL}")));
            }
            self.wake.at(after(facts.now, SignedDuration::from_secs(10)));
        }
        // The servers wait for these trainers.
        self.delete_surplus();
        if deadline > facts.now {
            self.wake.at(deadline);
        }
        if let Some(lost) = writer.and_then(|pod| facts.lost_at(pod)) {
            self.wake.at(lost);
        }
        if known.is_none() {
            self.event("Completing", "All trainers are done; waiting for the servers to end");
        }
        self.out.transient_for = Some(COMPLETING_DEBOUNCE);
        self.set_phase(Phase::Completing, "WaitingForServers".to_owned());
        let seconds = facts.job.server_drain.as_secs();
        let message = match writer {
            Some(_) => "all trainers are done; server 0 writes the model".to_owned(),
            None => format!("all trainers are done; the servers have {seconds} s to end"),
        };
        let completing = ConditionUpdate::yes("TrainersSucceeded", message);
        conditions::set(&mut self.out.status, ConditionType::Completing, completing, since);
        self.set(ConditionType::Running, ConditionUpdate::no("TrainersSucceeded", "all trainers are done"));
        self.clear(ConditionType::Restarting, "TrainersSucceeded");
    }

    /// Stops trainers whose success is not waited for, and then the servers, which wait for all of them. Those of an
    /// elastic job only wait for who is there, so they end by themselves.
    fn stop_the_rest(&mut self) {
        let rest = |(replica, pod): &(Replica, &ObservedPod)| {
            replica.role == Role::Trainer && pod.alive && !matches!(pod.phase, PodPhase::Succeeded { .. })
        };
        let facts = self.facts;
        if facts.history.done(Role::Trainer) >= facts.job.trainers {
            return;
        }
        let trainers = facts.pods().into_iter().filter(rest).map(|(_, pod)| pod).collect::<Vec<_>>();
        let servers = facts.pods_of(Role::Server).map(|(_, pod)| pod).filter(|pod| pod.alive).collect();
        for pod in if trainers.is_empty() && facts.job.policy.elastic.is_none() { servers } else { trainers } {
            self.delete(pod);
            self.delete_by_force_if_overdue(pod);
        }
    }

    fn succeed(&mut self, servers_ended: bool) {
        let trouble = self.facts.pods_of(Role::Server).find_map(|(replica, pod)| match &pod.phase {
            PodPhase::Failed(failure) => Some(format!("; {replica} {} at the end", failure.what)),
            _ => None,
        });
        let trouble = match trouble {
            _ if !servers_ended => {
                "; the servers did not end within spec.runPolicy.serverDrainSeconds and were stopped".into()
            }
            trouble => trouble.unwrap_or_default(),
        };
        let message = format!("{} ended well{trouble}", counted(self.facts.history.done(Role::Trainer), "trainer"));
        self.finish(Phase::Succeeded, ConditionType::Succeeded, &End::new("TrainersSucceeded", message));
    }

    pub(super) fn fail(&mut self, end: &End) {
        self.count();
        self.finish(Phase::Failed, ConditionType::Failed, end);
    }

    fn finish(&mut self, phase: Phase, condition: ConditionType, End { reason, message }: &End) {
        self.set_phase(phase, reason.clone());
        self.out.status.completion_time = Some(Time(self.facts.now));
        for type_ in [ConditionType::ServersReady, ConditionType::Running] {
            self.set(type_, ConditionUpdate::no(reason.clone(), "the job is finished"));
        }
        for type_ in [
            ConditionType::Restarting,
            ConditionType::Stalled,
            ConditionType::CheckpointFailing,
            ConditionType::Completing,
        ] {
            self.clear(type_, reason);
        }
        self.set(condition, ConditionUpdate::yes(reason.clone(), message.clone()));
        let note = format!("The job has {}: {message}", if phase == Phase::Failed { "failed" } else { "succeeded" });
        let warning = phase == Phase::Failed;
        self.out.events.push(Event { warning, reason: format!("{phase:?}"), note, pod: None });
        self.wake = Wake::default();
        self.clean_up();
    }

    /// Cleans up after the end: deletes pods as the policy says, and the job when its time is over.
    pub(super) fn clean_up(&mut self) {
        for (replica, pod) in &self.facts.observed.pods {
            let unwanted = match self.facts.job.clean_pod_policy {
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
        if let (Some(end), Some(ttl)) = (end, self.facts.job.ttl_after_finished) {
            self.out.delete_job = self.wake.is_over(after(end, ttl), self.facts.now);
        }
    }
}
