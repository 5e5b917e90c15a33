//! Conditions of an active job, and its phase.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::draft::{Draft, counted};
use super::facts::{Facts, after};
use super::timing::FIRST_STATUS_DEBOUNCE;
use crate::conditions::{self, ConditionUpdate};
use crate::controller::observe::{ObservedPod, PodPhase, Replica, WaitingReason};

impl Facts<'_> {
    /// Returns whether the job can train: all replicas run, or in an elastic job at least all servers and minReplicas
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
    fn waits_for(&self) -> Vec<Replica> {
        let has_failed = |replica| self.failed.iter().any(|failed| failed.replica == replica);
        let runs = |pod: &ObservedPod| matches!(pod.phase, PodPhase::Running | PodPhase::Succeeded { .. });
        let is_up = |replica| self.live(replica).is_some_and(runs) && !has_failed(replica);
        let is_wanted = |replica| {
            !(self.history.succeeded(replica) || self.history.is_lost(replica) || self.comes_too_late(replica))
        };
        self.job.replicas().filter(|&replica| !is_up(replica) && is_wanted(replica)).collect()
    }

    /// Returns whether a replica had a pod before, and the next one does not run yet.
    fn is_being_replaced(&self, replica: Replica) -> bool {
        let first = self.history.since(replica);
        match self.pod(replica) {
            Some(pod) => pod.ended() || pod.deletion_deadline.is_some() || self.is_lost(pod) || pod.incarnation > first,
            None => self.history.has_begun(replica),
        }
    }

    /// Formats when a replica is started again, ` at 2026-01-01T00:00:08Z`; empty if that is now.
    fn when(&self, lost: Replica) -> String {
        let due = self.failed.iter().find(|failed| failed.replica == lost).map(|failed| self.due(failed));
        due.filter(|&due| due > self.now).map(|due| format!(" at {due}")).unwrap_or_default()
    }
}

impl Draft<'_, '_> {
    pub(super) fn report_created(&mut self) {
        let facts = self.facts;
        let exists = |replica| facts.history.get(replica).is_some() || facts.comes_too_late(replica);
        let update = if let Some(refusal) = facts.observed.refused.first() {
            let again = "; it is tried again until it works";
            ConditionUpdate::no(
                "Refused",
                format!("creating {} was refused: {}{again}", refusal.child, refusal.message),
            )
        } else if facts.observed.service && facts.job.replicas().all(exists) {
            ConditionUpdate::yes("Created", "the service and all pods were created")
        } else if let Some(waiting) = facts.job.replicas().find(|&replica| facts.waits_for_servers(replica)) {
            ConditionUpdate::no(
                "WaitingForServers",
                format!("{waiting} and the other trainers are created when all servers are ready (spec.startupPolicy)"),
            )
        } else {
            ConditionUpdate::no("Creating", "")
        };
        let known = conditions::find(facts.prev, ConditionType::Created);
        if update.holds && !conditions::holds(facts.prev, ConditionType::Created) {
            let (servers, trainers) = (counted(facts.job.servers, "server"), counted(facts.job.trainers, "trainer"));
            self.event("Created", format!("Created the service and the pods of {servers} and {trainers}"));
        }
        if update.reason == "Refused" {
            if known.is_none_or(|known| known.message != update.message) {
                self.warning("Refused", update.message.clone(), None);
            }
            let since = known.filter(|known| known.reason == "Refused").map(|known| known.last_transition_time.0);
            self.retry_refused(since.unwrap_or(facts.now));
        }
        self.set(ConditionType::Created, update);
    }

    /// Retries refused creations after as long again as they have been refused, between a second and a minute.
    fn retry_refused(&mut self, since: Timestamp) {
        let (least, most) = (SignedDuration::from_secs(1), SignedDuration::from_mins(1));
        let now = self.facts.now;
        self.wake.at(after(now, now.duration_since(since).clamp(least, most)));
    }

    pub(super) fn report_running(&mut self) {
        let facts = self.facts;
        let waits_for = facts.waits_for();
        let waiting_reasons =
            waits_for.iter().filter_map(|&replica| Some((replica, facts.live(replica)?.waiting_reason.as_ref()?)));
        let waiting_reason = cause(waiting_reasons);
        let servers_ready = facts.servers_are_ready();
        // Once the job runs, a server whose probe fails for a moment does not take that back.
        let was_running = facts.prev.phase == Some(Phase::Running);
        let running = facts.has_enough(&waits_for) && (servers_ready || was_running);
        let lost = waits_for.iter().copied().find(|&replica| facts.is_being_replaced(replica));
        let restarts = lost.is_some() || (!running && conditions::holds(facts.prev, ConditionType::Restarting));

        let phase = match restarts {
            _ if running => Phase::Running,
            true => Phase::Restarting,
            false => Phase::Pending,
        };
        self.set(ConditionType::ServersReady, servers_ready_update(servers_ready, waiting_reason));
        let update = match running && !waits_for.is_empty() {
            true => facts.partly_running(&waits_for, waiting_reason),
            false => running_update(running, waiting_reason, waits_for.first().copied()),
        };
        self.set(ConditionType::Running, update);
        match lost {
            Some(replica) => self.report_restarting(replica),
            // The whole job restarts, and the condition names the cause already.
            None if restarts => {}
            None => self.clear(ConditionType::Restarting, "Running"),
        }
        self.set_phase(phase, self.reason(phase, waiting_reason.is_some()));
        // The status of a job that has just begun without a problem may wait for the creation of pods.
        let begins =
            facts.prev.phase.is_none() && !running && waiting_reason.is_none() && facts.observed.refused.is_empty();
        self.out.transient_for = begins.then_some(FIRST_STATUS_DEBOUNCE);
        if running && !was_running {
            let some = format!("{} and {}", counted(facts.job.servers, "server"), facts.running_trainers(&waits_for));
            self.event("Running", format!("Running: {some}"));
        }
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

    fn report_restarting(&mut self, lost: Replica) {
        let facts = self.facts;
        let known = conditions::holds(facts.prev, ConditionType::Restarting);
        let failed = facts.failed.iter().find(|failed| failed.replica == lost);
        let own = failed.is_some_and(|failed| !failed.response.has_other_cause);
        let failure = failed.map(|failed| &failed.failure);
        if known && !own {
            // What began it was seen before: our own delete, or a new pod that only has to start.
            return;
        }
        let update = match failure {
            Some(failure) => ConditionUpdate::yes(
                failure.reason.clone(),
                format!("{lost} {}; it is started again{}", failure.what, facts.when(lost)),
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
