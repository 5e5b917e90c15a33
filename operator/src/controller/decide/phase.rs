//! Conditions of an active job, and its phase.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::failure::Failed;
use super::timing::FIRST_STATUS_DEBOUNCE;
use super::{DecisionBuilder, counted};
use crate::conditions::{self, ConditionUpdate};
use crate::controller::observe::{ObservedPod, PodPhase, Replica, WaitingReason};

impl<'a> DecisionBuilder<'a> {
    pub(super) fn report_created(&mut self) {
        let exists = |replica| self.history.get(replica).is_some() || self.comes_too_late(replica);
        let update = if let Some(refusal) = self.observed.refused.first() {
            let again = "; it is tried again until it works";
            ConditionUpdate::no(
                "Refused",
                format!("creating {} was refused: {}{again}", refusal.child, refusal.message),
            )
        } else if self.observed.service && self.job.replicas().all(exists) {
            ConditionUpdate::yes("Created", "the service and all pods were created")
        } else if let Some(waiting) = self.job.replicas().find(|&replica| self.waits_for_servers(replica)) {
            ConditionUpdate::no(
                "WaitingForServers",
                format!("{waiting} and the other trainers are created when all servers are ready (spec.startupPolicy)"),
            )
        } else {
            ConditionUpdate::no("Creating", "")
        };
        let known = conditions::find(self.prev, ConditionType::Created);
        if update.holds && !conditions::holds(self.prev, ConditionType::Created) {
            self.event("Created", format!("Created the service and the pods of {}", self.members()));
        }
        if update.reason == "Refused" {
            if known.is_none_or(|known| known.message != update.message) {
                self.warning("Refused", update.message.clone(), None);
            }
            let since = known.filter(|known| known.reason == "Refused").map(|known| known.last_transition_time.0);
            self.retry_refused(since.unwrap_or(self.now));
        }
        self.set(ConditionType::Created, update);
    }

    /// Retries refused creations after as long again as they have been refused, between a second and a minute.
    fn retry_refused(&mut self, since: Timestamp) {
        let (least, most) = (SignedDuration::from_secs(1), SignedDuration::from_mins(1));
        let wait = self.now.duration_since(since).clamp(least, most);
        self.wake_at(self.after(self.now, wait));
    }

    pub(super) fn report_running(&mut self, failed: &[Failed<'_>]) {
        let waits_for = self.waits_for(failed);
        let waiting_reasons =
            waits_for.iter().filter_map(|&replica| Some((replica, self.live(replica)?.waiting_reason.as_ref()?)));
        let waiting_reason = cause(waiting_reasons);
        let servers_ready = self.servers_are_ready();
        // Once the job runs, a server whose probe fails for a moment does not take that back.
        let was_running = self.prev.phase == Some(Phase::Running);
        let running = self.has_enough(&waits_for) && (servers_ready || was_running);
        let lost = waits_for.iter().copied().find(|&replica| self.is_being_replaced(replica));
        let restarts = lost.is_some() || (!running && conditions::holds(self.prev, ConditionType::Restarting));

        let phase = match restarts {
            _ if running => Phase::Running,
            true => Phase::Restarting,
            false => Phase::Pending,
        };
        self.out.status.phase = Some(phase);
        self.set(ConditionType::ServersReady, servers_ready_update(servers_ready, waiting_reason));
        let update = match running && !waits_for.is_empty() {
            true => self.partly_running(&waits_for, waiting_reason),
            false => running_update(running, waiting_reason, waits_for.first().copied()),
        };
        self.set(ConditionType::Running, update);
        match lost {
            Some(replica) => self.report_restarting(replica, failed),
            // The whole job restarts, and the condition names the cause already.
            None if restarts => {}
            None => conditions::clear(&mut self.out.status, ConditionType::Restarting, "Running", self.now),
        }
        self.out.status.reason = self.reason(phase, waiting_reason.is_some());
        // The status of a job that has just begun without a problem may wait for the creation of pods.
        let begins =
            self.prev.phase.is_none() && !running && waiting_reason.is_none() && self.observed.refused.is_empty();
        self.out.transient_for = begins.then_some(FIRST_STATUS_DEBOUNCE);
        if running && !was_running {
            let some = format!("{} and {}", counted(self.job.servers, "server"), self.running_trainers(&waits_for));
            self.event("Running", format!("Running: {some}"));
        }
    }

    /// Tells whether the job can train: all replicas run, or in an elastic job at least all servers and minReplicas
    /// trainers.
    fn has_enough(&self, waits_for: &[Replica]) -> bool {
        let enough = |least| {
            let servers_are_up = waits_for.iter().all(|replica| replica.role == Role::Trainer);
            servers_are_up && self.trainers_left().saturating_sub(waits_for.len() as u32) >= least
        };
        waits_for.is_empty() || self.job.policy.elastic.is_some_and(|elastic| enough(elastic.min))
    }

    /// Formats the number of running trainers: `2 trainers`, `2 of 4 trainers`.
    fn running_trainers(&self, waits_for: &[Replica]) -> String {
        let (up, all) = (self.trainers_left().saturating_sub(waits_for.len() as u32), self.job.trainers);
        if up == all { counted(all, "trainer") } else { format!("{up} of {}", counted(all, "trainer")) }
    }

    /// Returns the condition Running of an elastic job that runs while it waits for some of its trainers.
    fn partly_running(
        &self,
        waits_for: &[Replica],
        waiting_reason: Option<(Replica, &WaitingReason)>,
    ) -> ConditionUpdate {
        let rest = match (waiting_reason, waits_for.first()) {
            (Some((replica, why)), _) => format!("; {replica} cannot start: {}", why.message),
            (None, Some(replica)) => format!("; waiting for {replica} to run"),
            (None, None) => String::new(),
        };
        ConditionUpdate::yes("Running", format!("all servers and {} run{rest}", self.running_trainers(waits_for)))
    }

    /// Returns the replicas that neither run nor are done, of those that the job still wants.
    fn waits_for(&self, failed: &[Failed<'_>]) -> Vec<Replica> {
        let has_failed = |replica| failed.iter().any(|failed| failed.replica == replica);
        let runs = |pod: &ObservedPod| matches!(pod.phase, PodPhase::Running | PodPhase::Succeeded { .. });
        let is_up = |replica| self.live(replica).is_some_and(runs) && !has_failed(replica);
        let is_wanted = |replica| {
            !(self.history.succeeded(replica) || self.history.is_lost(replica) || self.comes_too_late(replica))
        };
        self.job.replicas().filter(|&replica| !is_up(replica) && is_wanted(replica)).collect()
    }

    pub(super) fn servers_are_ready(&self) -> bool {
        let ready = |pod: &ObservedPod| pod.ready && pod.phase == PodPhase::Running;
        (0..self.job.servers).map(Replica::server).all(|server| self.live(server).is_some_and(ready))
    }

    /// Returns the pod of a replica, unless it is being deleted.
    fn live(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.pod(replica).filter(|pod| pod.deletion_deadline.is_none())
    }

    /// Returns the reason of the phase: that of the condition which explains it best.
    fn reason(&self, phase: Phase, waiting_reason: bool) -> Option<String> {
        let condition = |type_| conditions::find(&self.out.status, type_);
        let refused = condition(ConditionType::Created).filter(|created| created.reason == "Refused");
        let best = match phase {
            Phase::Restarting if !waiting_reason => condition(ConditionType::Restarting),
            Phase::Running => None,
            _ => refused,
        };
        best.or_else(|| condition(ConditionType::Running)).map(|condition| condition.reason.clone())
    }

    /// Tells whether a replica had a pod before, and the next one does not run yet.
    fn is_being_replaced(&self, replica: Replica) -> bool {
        let first = self.history.since(replica);
        match self.pod(replica) {
            Some(pod) => pod.ended() || pod.deletion_deadline.is_some() || self.is_lost(pod) || pod.incarnation > first,
            None => self.history.has_begun(replica),
        }
    }

    /// Formats when a replica is started again, ` at 2026-01-01T00:00:08Z`; empty if that is now.
    fn when(&self, lost: Replica, failed: &[Failed<'_>]) -> String {
        let due = failed.iter().find(|failed| failed.replica == lost).map(|failed| self.due(failed));
        due.filter(|&due| due > self.now).map(|due| format!(" at {due}")).unwrap_or_default()
    }

    fn report_restarting(&mut self, lost: Replica, failed: &[Failed<'_>]) {
        let known = conditions::holds(self.prev, ConditionType::Restarting);
        let failure = failed.iter().find(|failed| failed.replica == lost).map(|failed| &failed.failure);
        let own = failure.is_some_and(|failure| !failure.disruption);
        if known && !own {
            // What began it was seen before: our own delete, or a new pod that only has to start.
            return;
        }
        let update = match failure {
            Some(failure) => ConditionUpdate::yes(
                failure.reason.clone(),
                format!("{lost} {}; it is started again{}", failure.what, self.when(lost, failed)),
            ),
            None => {
                ConditionUpdate::yes("PodLost", format!("the pod of {lost} was deleted or lost; it is started again"))
            }
        };
        if !own {
            // A failure of its own had its event when it was counted.
            self.warning("PodLost", update.message.clone(), None);
        }
        self.set(ConditionType::Restarting, update);
    }
}

/// Returns the first waiting_reason that is a pod's own, or else the first.
pub(super) fn cause<'a>(
    mut waiting_reasons: impl Iterator<Item = (Replica, &'a WaitingReason)> + Clone,
) -> Option<(Replica, &'a WaitingReason)> {
    waiting_reasons.clone().find(|(_, waiting_reason)| waiting_reason.is_own()).or_else(|| waiting_reasons.next())
}

fn servers_ready_update(ready: bool, waiting_reason: Option<(Replica, &WaitingReason)>) -> ConditionUpdate {
    match waiting_reason.filter(|(replica, _)| replica.role == Role::Server) {
        _ if ready => ConditionUpdate::yes("ServersReady", "all servers are ready"),
        Some((server, why)) => cannot_start(server, why),
        None => ConditionUpdate::no("WaitingForServers", "not all servers are ready"),
    }
}

fn running_update(
    running: bool,
    waiting_reason: Option<(Replica, &WaitingReason)>,
    waits_for: Option<Replica>,
) -> ConditionUpdate {
    match (waiting_reason, waits_for) {
        _ if running => ConditionUpdate::yes("Running", "all servers and trainers run"),
        (Some((replica, why)), _) => cannot_start(replica, why),
        (None, Some(replica)) => ConditionUpdate::no("WaitingForPods", format!("waiting for {replica} to run")),
        (None, None) => ConditionUpdate::no("WaitingForServers", "waiting for the servers to be ready"),
    }
}

fn cannot_start(replica: Replica, why: &WaitingReason) -> ConditionUpdate {
    ConditionUpdate::no(why.reason.clone(), format!("{replica} cannot start: {}", why.message))
}
