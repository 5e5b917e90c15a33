//! A job that runs or is on its way there: create what is missing, replace what failed, and give up
//! when the job's policy says so.

use jiff::{SignedDuration, Timestamp};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, LastFailure, Phase, RestartPolicy};

use super::conditions::{self, Verdict};
use super::{Child, Draft};
use crate::controller::observe::{Failure, Life, ObservedPod, Obstacle, Replica};

/// A server that ended well while trainers still run is taken for failed after this long. Normally
/// the trainers' own end, which it waited for, is a moment away.
const EARLY_SERVER_END: SignedDuration = SignedDuration::from_secs(30);

/// How long the last log lines in the status may be.
const LOG_TAIL_BYTES: usize = 2048;

/// A failed pod, and what made it fail.
struct Failed<'a> {
    replica: Replica,
    pod: &'a ObservedPod,
    failure: Failure,
}

impl<'a> Draft<'a> {
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

    fn failed(&self) -> Vec<Failed<'a>> {
        let failed = |(replica, pod)| Some(Failed { replica, pod, failure: failure(replica, pod, self.now)? });
        self.pods().filter_map(failed).collect()
    }

    /// Reason and sentence, if the job's policy or deadline ends it.
    fn reason_to_give_up(&mut self, failed: &[Failed<'_>]) -> Option<(String, String)> {
        let own = || failed.iter().filter(|failed| !failed.failure.disruption);
        let fatal = own().find(|failed| failed.replica.role == Role::Trainer && self.is_fatal(&failed.failure));
        if let Some(Failed { replica, pod, failure }) = fatal {
            let policy = format!("{:?}", self.job.restart_policy);
            let message = format!(
                "{replica} (pod {}) {}, and spec.trainer.restartPolicy is {policy}, which ends the job",
                pod.name, failure.what
            );
            return Some(("TrainerFailed".into(), message));
        }
        let counted = self.prev.restarts_counted.unsigned_abs() + self.ledger.failed_since(&self.before);
        if counted > self.job.max_restarts {
            let Failed { replica, pod, failure } = own().min_by_key(|failed| failed.failure.at)?;
            let message = format!(
                "{replica} (pod {}) {}, and all {} restarts of spec.failurePolicy.maxRestarts are used up",
                pod.name, failure.what, self.job.max_restarts
            );
            return Some(("MaxRestartsExceeded".into(), message));
        }
        self.out.status.restarts_counted = counted.cast_signed();

        let deadline = self.job.active_deadline?;
        let start = self.out.status.start_time.as_ref()?.0;
        let end = self.after(start, deadline);
        if end <= self.now {
            let message = format!(
                "the job was active for {} s, as long as spec.runPolicy.activeDeadlineSeconds allows",
                deadline.as_secs()
            );
            return Some(("DeadlineExceeded".into(), message));
        }
        self.wake_at(end);
        None
    }

    fn is_fatal(&self, failure: &Failure) -> bool {
        match self.job.restart_policy {
            RestartPolicy::OnFailure => false,
            RestartPolicy::Never => true,
            RestartPolicy::ExitCode => failure.exit_code.is_some_and(|code| (1..128).contains(&code)),
        }
    }

    /// The first failure since the job last ran well is the one that the trouble began with.
    fn record_last_failure(&mut self, failed: &[Failed<'_>]) {
        let own = failed.iter().filter(|failed| !failed.failure.disruption);
        let Some(first) = own.min_by_key(|failed| (failed.failure.at, failed.replica)) else { return };
        let earlier = self.prev.last_failure.as_ref().filter(|_| !conditions::holds(self.prev, ConditionType::Running));
        let is_later = |known: &LastFailure| known.time.as_ref().is_some_and(|time| time.0 <= first.failure.at);
        if earlier.is_some_and(is_later) {
            return;
        }
        let Failed { replica, pod, failure } = first;
        self.out.status.last_failure = Some(LastFailure {
            pod: pod.name.clone(),
            role: replica.role.to_string(),
            rank: self.job.rank(*replica).cast_signed(),
            exit_code: failure.exit_code,
            reason: failure.reason.clone(),
            message: format!("{replica} {}", failure.what),
            log_tail: tail(&failure.log_tail, LOG_TAIL_BYTES),
            time: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(failure.at)),
        });
    }

    /// One warning for each failure that this decision counts.
    fn tell_failures(&mut self, failed: &[Failed<'_>]) {
        for Failed { replica, pod, failure } in failed {
            let failures = |ledger: &super::Ledger| ledger.get(*replica).map_or(0, |record| record.failures);
            if failures(&self.ledger) > failures(&self.before) {
                let note = format!(
                    "{replica} {}; it is started again (restart {} of {})",
                    failure.what, self.out.status.restarts_counted, self.job.max_restarts
                );
                self.warning("PodFailed", note, Some(pod));
            }
        }
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
                Some(pod) => self.make_way(replica, pod, failed),
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
        let first = self.prev.first_incarnation.unsigned_abs();
        for (replica, pod) in &self.world.pods {
            if replica.index >= self.job.count(replica.role) || pod.incarnation < first {
                self.delete(pod);
                self.delete_by_force_if_overdue(pod);
            }
        }
    }

    fn report_created(&mut self) {
        let exists = |replica| self.ledger.get(replica).is_some();
        let verdict = if let Some(refusal) = self.world.refused.first() {
            let again = "; it is tried again until it works";
            Verdict::no("Refused", format!("creating {} was refused: {}{again}", refusal.child, refusal.message))
        } else if self.world.service && self.job.replicas().all(exists) {
            Verdict::yes("Created", "the service and all pods were created")
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

    fn report_running(&mut self, failed: &[Failed<'_>]) {
        let pod = |replica: &Replica| self.current(*replica).filter(|pod| pod.gone_by.is_none());
        let runs = |replica: &Replica| {
            pod(replica).is_some_and(|pod| matches!(pod.life, Life::Running | Life::Succeeded { .. }))
        };
        let runs = |replica: &Replica| runs(replica) && !failed.iter().any(|failed| failed.replica == *replica);
        let ready = |replica: &Replica| pod(replica).is_some_and(|pod| pod.ready && pod.life == Life::Running);
        let servers_ready = self.job.replicas().filter(|r| r.role == Role::Server).all(|r| ready(&r));
        let waits_for: Vec<Replica> = self.job.replicas().filter(|r| !runs(r) && !self.ledger.succeeded(*r)).collect();
        let obstacle = waits_for.iter().find_map(|replica| Some((*replica, pod(replica)?.obstacle.clone()?)));
        let was_running = self.prev.phase == Some(Phase::Running);

        self.set(
            ConditionType::ServersReady,
            match (servers_ready, &obstacle) {
                (true, _) => Verdict::yes("ServersReady", "all servers are ready"),
                (false, Some((replica, why))) if replica.role == Role::Server => told(*replica, why),
                (false, _) => Verdict::no("WaitingForServers", "not all servers are ready"),
            },
        );
        // Once the job runs, a server whose probe fails for a moment does not take that back.
        let running = waits_for.is_empty() && (servers_ready || was_running);
        let verdict = match (&obstacle, waits_for.first()) {
            _ if running => Verdict::yes("Running", "all servers and trainers run"),
            (Some((replica, why)), _) => told(*replica, why),
            (None, Some(replica)) => Verdict::no("WaitingForPods", format!("waiting for {replica} to run")),
            (None, None) => Verdict::no("WaitingForServers", "waiting for the servers to be ready"),
        };
        let lost = waits_for.iter().copied().find(|replica| self.is_being_replaced(*replica));
        let phase = match lost {
            _ if running => Phase::Running,
            Some(_) => Phase::Restarting,
            None => Phase::Pending,
        };
        match lost.filter(|_| !running) {
            Some(replica) => self.report_restarting(replica, failed),
            None => conditions::clear(&mut self.out.status, ConditionType::Restarting, "Running", self.now),
        }
        if running && !was_running {
            self.notice("Running", format!("Running: {}", self.members()));
        }
        let created = conditions::find(&self.out.status, ConditionType::Created);
        let refused = created.filter(|created| created.reason == "Refused").map(|created| created.reason.clone());
        self.out.status.phase = Some(phase);
        self.out.status.reason = Some(match phase {
            Phase::Restarting if obstacle.is_none() => self.restart_reason(),
            _ => refused.unwrap_or_else(|| verdict.reason.clone()),
        });
        self.set(ConditionType::Running, verdict);
    }

    /// It had a pod before, and the one that takes its place does not run yet.
    fn is_being_replaced(&self, replica: Replica) -> bool {
        let first = self.prev.first_incarnation.unsigned_abs();
        match self.current(replica) {
            Some(pod) => pod.ended() || pod.gone_by.is_some() || pod.incarnation > first,
            None => self.ledger.get(replica).is_some(),
        }
    }

    fn report_restarting(&mut self, lost: Replica, failed: &[Failed<'_>]) {
        let known = conditions::find(self.prev, ConditionType::Restarting).filter(|known| known.status == "True");
        let verdict = match failed.iter().find(|failed| failed.replica == lost) {
            Some(Failed { replica, failure, .. }) => {
                Verdict::yes(failure.reason.clone(), format!("{replica} {}; it is started again", failure.what))
            }
            // What began it was seen before; the new pod only has to start.
            None if known.is_some() => return,
            None => Verdict::yes("PodLost", format!("the pod of {lost} was deleted or lost; it is started again")),
        };
        if known.is_none() && verdict.reason == "PodLost" {
            self.warning("PodLost", verdict.message.clone(), None);
        }
        self.set(ConditionType::Restarting, verdict);
    }

    fn restart_reason(&self) -> String {
        let restarting = conditions::find(&self.out.status, ConditionType::Restarting);
        restarting.map_or_else(String::new, |condition| condition.reason.clone())
    }
}

/// Whether and why a pod failed, as seen while the job is active.
fn failure(replica: Replica, pod: &ObservedPod, now: Timestamp) -> Option<Failure> {
    match &pod.life {
        Life::Failed(failure) => Some(failure.clone()),
        Life::Succeeded { at, .. } if replica.role == Role::Server && *at + EARLY_SERVER_END <= now => Some(Failure {
            disruption: false,
            exit_code: Some(0),
            reason: "EndedEarly".into(),
            what: "ended with exit code 0 although trainers still run; a server must run until they are done".into(),
            log_tail: String::new(),
            at: *at,
        }),
        _ => None,
    }
}

/// Before the pod after incarnation `n` of a replica: 0, 1, 2, 4, ... 60 s.
fn back_off(incarnation: u32) -> SignedDuration {
    let seconds = incarnation.checked_sub(1).map_or(0, |doublings| 1_i64 << doublings.min(6));
    SignedDuration::from_secs(seconds.min(60))
}

fn told(replica: Replica, why: &Obstacle) -> Verdict {
    Verdict::no(why.reason.clone(), format!("{replica} cannot start: {}", why.message))
}

/// The last `bytes` of a text, from the start of a line where there is one.
fn tail(text: &str, bytes: usize) -> String {
    let cut = text.ceil_char_boundary(text.len().saturating_sub(bytes));
    let tail = &text[cut..];
    match tail.split_once('\n') {
        Some((_, lines)) if cut > 0 => lines.to_owned(),
        _ => tail.to_owned(),
    }
}
