//! `spec.failurePolicy`: what a failure leads to. The first rule that matches it decides; without one the role's
//! restart policy does, then exit code 2, which stands for wrong input and ends the job, then the job's restart
//! strategy. A process that ended because its peer is away is started again and not counted: the peer is the cause.

use std::time::Duration;

use psjobs_api::Role;
use psjobs_api::crd::{FailureAction, FailureRule, RestartPolicy, RestartStrategy};
use psjobs_api::exit_code::{PEER_AWAY, WRONG_INPUT};

use crate::backoff;
use crate::job_policy::JobPolicy;

/// The longest sentence of a program that is repeated, in characters.
const LONGEST_SENTENCE: usize = 1000;

/// A failure, by what rules can say about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failure<'a> {
    /// Role of the replica that failed; none if the whole job did, as one that makes no step.
    pub role: Option<Role>,
    /// The replica was taken away, so that its program is not to blame.
    pub disruption: bool,
    /// Exit code of its program, if it ended by itself.
    pub exit_code: Option<i32>,
    /// One word, as lastFailure.reason has it.
    pub reason: &'a str,
    /// Types of the pod conditions that are True.
    pub conditions: &'a [String],
    /// The last lines that the replica's own program wrote; none if it was another that ended, as one that prepares it.
    pub log_tail: Option<&'a str>,
}

/// The action after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The job fails.
    FailJob {
        /// One word, for a condition.
        reason: &'static str,
        /// The rule that says so; it continues a sentence about the failure: `trainer 0 ended with exit code 1, and
        /// ...`.
        because: String,
    },
    /// The replica is started again.
    RestartReplica,
    /// All replicas are started again.
    RestartJob,
}

/// An action, whether it counts towards spec.failurePolicy.maxRestarts, and whether the failure may be the job's last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The action.
    pub action: Action,
    /// True if the failure counts towards the maximum of restarts.
    pub counts: bool,
    /// True if something else is the cause: the replica was taken away, or ended because another one is away. Such a
    /// failure is never the job's `lastFailure`.
    pub has_other_cause: bool,
}

impl Failure<'_> {
    /// Returns true if a program of the job ended by itself because another process of the job is away.
    fn is_for_want_of_a_peer(&self) -> bool {
        let of_own_program = self.role.is_some() && self.log_tail.is_some();
        of_own_program && !self.disruption && self.exit_code == Some(PEER_AWAY)
    }
}

impl JobPolicy {
    /// Returns what a failure leads to, without regard to the number of restarts so far.
    #[must_use]
    pub fn respond_to(&self, failure: &Failure<'_>) -> Response {
        let (own, counts) = (!failure.disruption, false);
        let has_other_cause = failure.disruption;
        if let Some(rule) = self.failure_policy.rules.iter().find(|rule| matches(rule, failure)) {
            let (action, counts) = by_rule(rule, failure.role.is_some(), own && rule.count_towards_max);
            return Response { action, counts, has_other_cause };
        }
        if failure.is_for_want_of_a_peer() {
            // Also with RecreateAll: the replica that is away has its own response, and the others wait for it.
            return Response { action: Action::RestartReplica, counts, has_other_cause: true };
        }
        if let Some(action) = failure.role.filter(|_| own).and_then(|role| self.end_by_restart_policy(role, failure)) {
            return Response { action, counts, has_other_cause };
        }
        if let (true, Some(_), Some(log_tail)) = (own, failure.role, failure.log_tail)
            && failure.exit_code == Some(WRONG_INPUT)
        {
            return Response { action: wrong_input(log_tail), counts, has_other_cause };
        }
        let whole_job = failure.role.is_none() || self.failure_policy.restart_strategy == RestartStrategy::RecreateAll;
        let action = if whole_job { Action::RestartJob } else { Action::RestartReplica };
        Response { action, counts: own, has_other_cause }
    }

    /// Returns how long the restart waits after so many failures in a row.
    #[must_use]
    pub fn wait(&self, failures_in_a_row: u32) -> Duration {
        backoff::wait(&self.failure_policy.backoff, failures_in_a_row)
    }

    /// Returns the number of failures in a row, this one included; see [`backoff::failures_in_a_row`].
    #[must_use]
    pub fn failures_in_a_row(&self, before: u32, ran: Duration) -> u32 {
        backoff::failures_in_a_row(&self.failure_policy.backoff, before, ran)
    }

    fn end_by_restart_policy(&self, role: Role, failure: &Failure<'_>) -> Option<Action> {
        let (policy, field, reason) = match role {
            Role::Server => (self.server_restart_policy, "spec.ps.restartPolicy", "ServerFailed"),
            Role::Trainer => (self.trainer_restart_policy, "spec.trainer.restartPolicy", "TrainerFailed"),
        };
        let ends = match policy {
            RestartPolicy::OnFailure => false,
            RestartPolicy::Never => true,
            RestartPolicy::ExitCode => failure.exit_code.is_some_and(|code| (1..128).contains(&code)),
        };
        ends.then(|| Action::FailJob { reason, because: format!("{field} is {policy:?}, which ends the job") })
    }
}

fn wrong_input(log_tail: &str) -> Action {
    let because = match sentence(log_tail) {
        Some(sentence) => format!("that means wrong input, so it is not started again: {sentence}"),
        None => "that means wrong input, so it is not started again; it wrote nothing".into(),
    };
    Action::FailJob { reason: "WrongInput", because }
}

/// Returns the sentence that a program ended with: the last line that begins as an error of a worker or of an argument
/// parser does, which writes its usage after that; else the last line.
fn sentence(log_tail: &str) -> Option<String> {
    let lines = || log_tail.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let error = |line| ["psjobs-worker: ", "error: "].into_iter().find_map(|prefix| str::strip_prefix(line, prefix));
    let line = lines().find_map(error).or_else(|| lines().next())?;
    Some(line.chars().take(LONGEST_SENTENCE).collect())
}

fn by_rule(rule: &FailureRule, of_replica: bool, counts: bool) -> (Action, bool) {
    match rule.action {
        FailureAction::FailJob => {
            let because = format!("rule {} of spec.failurePolicy says FailJob", rule.name);
            (Action::FailJob { reason: "FailurePolicyRule", because }, false)
        }
        FailureAction::RestartPod if of_replica => (Action::RestartReplica, counts),
        FailureAction::Ignore if of_replica => (Action::RestartReplica, false),
        FailureAction::RestartPod | FailureAction::RestartJob => (Action::RestartJob, counts),
        FailureAction::Ignore => (Action::RestartJob, false),
    }
}

fn matches(rule: &FailureRule, failure: &Failure<'_>) -> bool {
    let FailureRule { target_roles, on_exit_codes, on_reasons, on_pod_conditions, .. } = rule;
    let of_role =
        target_roles.is_empty() || failure.role.is_some_and(|role| target_roles.iter().any(|target| target.is(role)));
    let exit_code = on_exit_codes.is_empty() || failure.exit_code.is_some_and(|code| on_exit_codes.contains(&code));
    let reason = on_reasons.is_empty() || on_reasons.iter().any(|reason| reason == failure.reason);
    let holds = |type_: &String| failure.conditions.contains(type_);
    let condition = on_pod_conditions.is_empty() || on_pod_conditions.iter().any(holds);
    // The exit code of a replica that was taken away is that of being killed.
    let about_it = match failure.is_for_want_of_a_peer() {
        true => !on_exit_codes.is_empty(),
        false => !failure.disruption || !on_reasons.is_empty() || !on_pod_conditions.is_empty(),
    };
    of_role && exit_code && reason && condition && about_it
}

#[cfg(test)]
mod tests;
