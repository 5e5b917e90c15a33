//! The course of a job that runs or is about to, in one order of precedence: it fails, stalls, restarts, stands back, or its
//! pods are created and replaced.

use jiff::Timestamp;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_policy::Action;

use super::deadline::{Backoff, STALLED};
use super::draft::{Draft, Wake};
use super::facts::{Facts, after};
use super::finish::End;
use crate::controller::observe::Failure;

const SERVERS_SHARE_NODE: &str = "all servers run on one node, because spec.checkpoint.volumeClaim is ReadWriteOnce; \
    spec.ps.replicationFactor 2 survives the loss of a server then, not of that node: for both use accessMode \
    ReadWriteMany";

/// The course of an active job.
enum Course {
    /// It fails over the end of a pod, for which no restart is left.
    FailOverPod(End),
    /// It has missed a deadline.
    FailOverDeadline(End),
    /// Its status says that it is stalled; the next decision does something about it.
    Stall(Failure),
    /// It fails, or all pods start again, because it is stalled.
    EndStall(Failure),
    /// All pods start again after the back-off.
    WaitForRestart { due: Timestamp, reason: String, what: String },
    /// All pods start again; this is the restart `in_a_row`, if that is counted.
    Restart { reason: String, what: String, counts: bool, in_a_row: Option<u32> },
    /// It has no pods for a while, because no nodes were found for them.
    StandBack { begins: Option<String> },
    /// Missing pods are created, and failed ones replaced.
    Run,
}

/// Chooses the course: the first that applies, in this order. Sets `wake` to when another one may apply.
fn choose(facts: &Facts<'_>, wake: &mut Wake) -> Course {
    if let Some(end) = facts.fatal_failure() {
        return Course::FailOverPod(end);
    }
    if let Some(end) = facts.missed_deadline(wake) {
        return Course::FailOverDeadline(end);
    }
    if let Some(failure) = facts.stalled(wake) {
        return match facts.prev.phase {
            Some(Phase::Stalled) => Course::EndStall(failure),
            _ => Course::Stall(failure),
        };
    }
    if let Some(course) = restart_over_failure(facts).or_else(|| restart_over_certificates(facts, wake)) {
        return course;
    }
    match facts.scheduling_backoff(wake) {
        Some(Backoff::Begins(message)) => Course::StandBack { begins: Some(message) },
        Some(Backoff::GoesOn) => Course::StandBack { begins: None },
        None => Course::Run,
    }
}

/// All pods start again if a failure wants that, after the back-off.
fn restart_over_failure(facts: &Facts<'_>) -> Option<Course> {
    let of_all = || facts.failed.iter().filter(|failed| failed.response.action == Action::RestartJob);
    let first = of_all().min_by_key(|failed| (failed.failure.at, failed.replica))?;
    let policy = &facts.job.policy;
    let in_a_row = policy.failures_in_a_row(facts.prev.recreations_in_a_row.unsigned_abs(), first.failure.ran());
    let due = after(first.failure.at, policy.wait(in_a_row));
    let (reason, what) = (first.failure.reason.clone(), format!("{} {}", first.replica, first.failure.what));
    if due > facts.now {
        return Some(Course::WaitForRestart { due, reason, what });
    }
    let counts = of_all().any(|failed| failed.response.counts);
    Some(Course::Restart { reason, what, counts, in_a_row: Some(in_a_row) })
}

/// All pods start again with new certificates before theirs end.
fn restart_over_certificates(facts: &Facts<'_>, wake: &mut Wake) -> Option<Course> {
    let end = facts.renews_certificates(wake)?;
    let (reason, what) = ("CertificatesExpire".into(), format!("the job's certificates end at {end}"));
    Some(Course::Restart { reason, what, counts: false, in_a_row: None })
}

impl Draft<'_, '_> {
    pub(super) fn run(&mut self) {
        let facts = self.facts;
        if facts.prev.phase == Some(Phase::Suspended) {
            self.event("Resumed", resumes_from(facts));
        }
        if facts.prev.phase.is_none() && facts.job.servers_share_node() && facts.job.servers_are_replicated() {
            self.warning("ServersShareNode", SERVERS_SHARE_NODE, None);
        }
        self.report_scaling();
        self.note_start();
        self.note_certificates();
        self.clear(ConditionType::Suspended, "Resumed");
        self.clear(ConditionType::Completing, "ModelMissing");
        self.record_last_failure();
        self.report_losses();
        self.report_checkpoints();

        let course = choose(facts, &mut self.wake);
        if !matches!(course, Course::FailOverPod(_)) {
            self.out.status.restarts_counted = facts.restarts_counted().cast_signed();
        }
        if !matches!(course, Course::Stall(_) | Course::EndStall(_)) {
            self.clear(ConditionType::Stalled, "Progress");
        }
        match course {
            Course::FailOverPod(end) | Course::FailOverDeadline(end) => self.fail(&end),
            Course::Stall(failure) => self.report_stall(&failure),
            Course::EndStall(failure) => self.end_stall(&failure),
            Course::WaitForRestart { due, reason, what } => self.wait_for_restart(due, &reason, &what),
            Course::Restart { reason, what, counts, in_a_row } => {
                if let Some(in_a_row) = in_a_row {
                    self.out.status.recreations_in_a_row = in_a_row.cast_signed();
                }
                self.recreate(&reason, &what, counts);
            }
            Course::StandBack { begins } => self.stand_back(begins),
            Course::Run => {
                self.report_failures();
                self.reconcile_replicas();
                self.delete_surplus();
                self.count();
                self.report_created();
                self.report_running();
                self.report_progress();
            }
        }
    }

    /// Fails a job that is stalled, or starts all its pods again, as its policy says.
    fn end_stall(&mut self, failure: &Failure) {
        self.record_stall(failure);
        match self.facts.end_of_stall(failure) {
            Err(end) => self.fail(&end),
            Ok(counts) => self.recreate(STALLED, &format!("the job {}", failure.what), counts),
        }
    }
}

fn resumes_from(facts: &Facts<'_>) -> &'static str {
    // `resume` is about the checkpoints of other runs.
    if facts.job.object.spec.checkpoint.is_some() {
        "The job is started again, from its last checkpoint if it has any"
    } else {
        "The job is started again, from the beginning"
    }
}
