//! What an active job's conditions say, and the phase that sums them up.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, Phase};

use super::conditions::{self, Verdict};
use super::failure::Failed;
use super::{Draft, counted};
use crate::controller::memory::BEGINNING;
use crate::controller::observe::{Life, ObservedPod, Obstacle, Replica};

impl<'a> Draft<'a> {
    pub(super) fn report_created(&mut self) {
        let exists = |replica| self.ledger.get(replica).is_some() || self.comes_too_late(replica);
        let verdict = if let Some(refusal) = self.world.refused.first() {
            let again = "; it is tried again until it works";
            Verdict::no("Refused", format!("creating {} was refused: {}{again}", refusal.child, refusal.message))
        } else if self.world.service && self.job.replicas().all(exists) {
            Verdict::yes("Created", "the service and all pods were created")
        } else if let Some(waiting) = self.job.replicas().find(|&replica| self.waits_for_servers(replica)) {
            Verdict::no(
                "WaitingForServers",
                format!("{waiting} and the other trainers are created when all servers are ready (spec.startupPolicy)"),
            )
        } else {
            Verdict::no("Creating", "")
        };
        let known = conditions::find(self.prev, ConditionType::Created);
        if verdict.holds && !conditions::holds(self.prev, ConditionType::Created) {
            self.notice("Created", format!("Created the service and the pods of {}", self.members()));
        }
        if verdict.reason == "Refused" {
            if known.is_none_or(|known| known.message != verdict.message) {
                self.warning("Refused", verdict.message.clone(), None);
            }
            let since = known.filter(|known| known.reason == "Refused").map(|known| known.last_transition_time.0);
            self.retry_refused(since.unwrap_or(self.now));
        }
        self.set(ConditionType::Created, verdict);
    }

    /// As long again as it has been refused for: a short hiccup costs a second, a full quota a try a minute.
    fn retry_refused(&mut self, since: Timestamp) {
        let (least, most) = (SignedDuration::from_secs(1), SignedDuration::from_mins(1));
        let wait = self.now.duration_since(since).clamp(least, most);
        self.wake_at(self.after(self.now, wait));
    }

    pub(super) fn report_running(&mut self, failed: &[Failed<'_>]) {
        let waits_for = self.waits_for(failed);
        let obstacles = waits_for.iter().filter_map(|&replica| Some((replica, self.live(replica)?.obstacle.as_ref()?)));
        let obstacle = cause(obstacles);
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
        self.set(ConditionType::ServersReady, servers_verdict(servers_ready, obstacle));
        let verdict = match running && !waits_for.is_empty() {
            true => self.partly_running(&waits_for, obstacle),
            false => running_verdict(running, obstacle, waits_for.first().copied()),
        };
        self.set(ConditionType::Running, verdict);
        match lost {
            Some(replica) => self.report_restarting(replica, failed),
            // All of them are: what began it is told already.
            None if restarts => {}
            None => conditions::clear(&mut self.out.status, ConditionType::Restarting, "Running", self.now),
        }
        self.out.status.reason = self.reason(phase, obstacle.is_some());
        // A job that has just begun, and nothing is in its way: its pods, and those of others, come first.
        let begins = self.prev.phase.is_none() && !running && obstacle.is_none() && self.world.refused.is_empty();
        self.out.passing = begins.then_some(BEGINNING);
        if running && !was_running {
            let some = format!("{} and {}", counted(self.job.servers, "server"), self.running_trainers(&waits_for));
            self.notice("Running", format!("Running: {some}"));
        }
    }

    /// Whether the job can train: everybody is up, or of an elastic job at least all servers and minReplicas
    /// trainers.
    fn has_enough(&self, waits_for: &[Replica]) -> bool {
        let enough = |least| {
            let servers_are_up = waits_for.iter().all(|replica| replica.role == Role::Trainer);
            servers_are_up && self.trainers_left().saturating_sub(waits_for.len() as u32) >= least
        };
        waits_for.is_empty() || self.job.policy.elastic.is_some_and(|elastic| enough(elastic.min))
    }

    /// `2 trainers`, `2 of 4 trainers`.
    fn running_trainers(&self, waits_for: &[Replica]) -> String {
        let (up, all) = (self.trainers_left().saturating_sub(waits_for.len() as u32), self.job.trainers);
        if up == all { counted(all, "trainer") } else { format!("{up} of {}", counted(all, "trainer")) }
    }

    /// What an elastic job says that runs while it waits for some of its trainers.
    fn partly_running(&self, waits_for: &[Replica], obstacle: Option<(Replica, &Obstacle)>) -> Verdict {
        let rest = match (obstacle, waits_for.first()) {
            (Some((replica, why)), _) => format!("; {replica} cannot start: {}", why.message),
            (None, Some(replica)) => format!("; waiting for {replica} to run"),
            (None, None) => String::new(),
        };
        Verdict::yes("Running", format!("all servers and {} run{rest}", self.running_trainers(waits_for)))
    }

    /// Replicas that neither run nor are done, of those that the job still wants.
    fn waits_for(&self, failed: &[Failed<'_>]) -> Vec<Replica> {
        let has_failed = |replica| failed.iter().any(|failed| failed.replica == replica);
        let runs = |pod: &ObservedPod| matches!(pod.life, Life::Running | Life::Succeeded { .. });
        let is_up = |replica| self.live(replica).is_some_and(runs) && !has_failed(replica);
        let is_wanted =
            |replica| !(self.ledger.succeeded(replica) || self.ledger.is_lost(replica) || self.comes_too_late(replica));
        self.job.replicas().filter(|&replica| !is_up(replica) && is_wanted(replica)).collect()
    }

    pub(super) fn servers_are_ready(&self) -> bool {
        let ready = |pod: &ObservedPod| pod.ready && pod.life == Life::Running;
        (0..self.job.servers).map(Replica::server).all(|server| self.live(server).is_some_and(ready))
    }

    /// The pod of a replica, unless it is being deleted.
    fn live(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.pod(replica).filter(|pod| pod.gone_by.is_none())
    }

    /// The word for the phase: that of the condition which explains it best.
    fn reason(&self, phase: Phase, obstacle: bool) -> Option<String> {
        let condition = |type_| conditions::find(&self.out.status, type_);
        let refused = condition(ConditionType::Created).filter(|created| created.reason == "Refused");
        let best = match phase {
            Phase::Restarting if !obstacle => condition(ConditionType::Restarting),
            Phase::Running => None,
            _ => refused,
        };
        best.or_else(|| condition(ConditionType::Running)).map(|condition| condition.reason.clone())
    }

    /// It had a pod before, and the one that takes its place does not run yet.
    fn is_being_replaced(&self, replica: Replica) -> bool {
        let first = self.ledger.since(replica);
        match self.pod(replica) {
            Some(pod) => pod.ended() || pod.gone_by.is_some() || self.is_lost(pod) || pod.incarnation > first,
            None => self.ledger.has_begun(replica),
        }
    }

    /// ` at 2026-01-01T00:00:08Z`, if that is still to come.
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
        let verdict = match failure {
            Some(failure) => Verdict::yes(
                failure.reason.clone(),
                format!("{lost} {}; it is started again{}", failure.what, self.when(lost, failed)),
            ),
            None => Verdict::yes("PodLost", format!("the pod of {lost} was deleted or lost; it is started again")),
        };
        if !own {
            // A failure of its own was told when it was counted.
            self.warning("PodLost", verdict.message.clone(), None);
        }
        self.set(ConditionType::Restarting, verdict);
    }
}

/// The first of obstacles that is a pod's own, or else the first.
pub(super) fn cause<'a>(
    mut obstacles: impl Iterator<Item = (Replica, &'a Obstacle)> + Clone,
) -> Option<(Replica, &'a Obstacle)> {
    obstacles.clone().find(|(_, obstacle)| obstacle.is_own()).or_else(|| obstacles.next())
}

fn servers_verdict(ready: bool, obstacle: Option<(Replica, &Obstacle)>) -> Verdict {
    match obstacle.filter(|(replica, _)| replica.role == Role::Server) {
        _ if ready => Verdict::yes("ServersReady", "all servers are ready"),
        Some((server, why)) => told(server, why),
        None => Verdict::no("WaitingForServers", "not all servers are ready"),
    }
}

fn running_verdict(running: bool, obstacle: Option<(Replica, &Obstacle)>, waits_for: Option<Replica>) -> Verdict {
    match (obstacle, waits_for) {
        _ if running => Verdict::yes("Running", "all servers and trainers run"),
        (Some((replica, why)), _) => told(replica, why),
        (None, Some(replica)) => Verdict::no("WaitingForPods", format!("waiting for {replica} to run")),
        (None, None) => Verdict::no("WaitingForServers", "waiting for the servers to be ready"),
    }
}

fn told(replica: Replica, why: &Obstacle) -> Verdict {
    Verdict::no(why.reason.clone(), format!("{replica} cannot start: {}", why.message))
}
