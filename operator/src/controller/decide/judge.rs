//! What a failure leads to: the first rule of spec.failurePolicy that matches it decides, and without
//! one the role's restart policy and the job's restart strategy do.

use jiff::SignedDuration;
use psjobs_api::Role;
use psjobs_api::crd::{Backoff, FailureAction, FailureRule, RestartPolicy, RestartStrategy};

use super::ledger::Toll;
use crate::controller::observe::{Failure, ObservedPod};
use crate::controller::validate::ValidJob;

/// Reason of the failure that a job without progress is taken for.
pub const STALLED: &str = "Stalled";

/// What to do about a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The job fails: reason, and what in the spec says so.
    FailJob(&'static str, String),
    RestartPod,
    RestartJob,
}

/// A remedy, and whether it counts towards spec.failurePolicy.maxRestarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    pub remedy: Remedy,
    pub counts: bool,
}

/// Judges a failure of a role, or of the whole job if `role` is none.
pub fn judge(job: &ValidJob, role: Option<Role>, failure: &Failure) -> Judgement {
    let own = !failure.disruption;
    if let Some(rule) = job.failure_policy.rules.iter().find(|rule| matches(rule, role, failure)) {
        let counts = own && rule.count_towards_max;
        let (remedy, counts) = match rule.action {
            FailureAction::FailJob => (fail(rule), false),
            FailureAction::RestartPod if role.is_some() => (Remedy::RestartPod, counts),
            FailureAction::Ignore if role.is_some() => (Remedy::RestartPod, false),
            FailureAction::RestartPod | FailureAction::RestartJob => (Remedy::RestartJob, counts),
            FailureAction::Ignore => (Remedy::RestartJob, false),
        };
        return Judgement { remedy, counts };
    }
    if let Some(because) = role.filter(|_| own).and_then(|role| fatal(job, role, failure)) {
        return Judgement { remedy: because, counts: false };
    }
    let whole_job = role.is_none() || job.failure_policy.restart_strategy == RestartStrategy::RecreateAll;
    Judgement { remedy: if whole_job { Remedy::RestartJob } else { Remedy::RestartPod }, counts: own }
}

fn fail(rule: &FailureRule) -> Remedy {
    let because = format!("rule {} of spec.failurePolicy says FailJob", rule.name);
    Remedy::FailJob("FailurePolicyRule", because)
}

fn matches(rule: &FailureRule, role: Option<Role>, failure: &Failure) -> bool {
    let FailureRule { target_roles, on_exit_codes, on_reasons, on_pod_conditions, .. } = rule;
    let of_role = target_roles.is_empty() || role.is_some_and(|role| target_roles.iter().any(|target| target.is(role)));
    let exit_code = on_exit_codes.is_empty() || failure.exit_code.is_some_and(|code| on_exit_codes.contains(&code));
    let reason = on_reasons.is_empty() || on_reasons.contains(&failure.reason);
    let holds = |type_: &String| failure.conditions.contains(type_);
    let condition = on_pod_conditions.is_empty() || on_pod_conditions.iter().any(holds);
    // The exit code of a pod that was taken away is that of being killed.
    let about_it = !failure.disruption || !on_reasons.is_empty() || !on_pod_conditions.is_empty();
    of_role && exit_code && reason && condition && about_it
}

fn fatal(job: &ValidJob, role: Role, failure: &Failure) -> Option<Remedy> {
    let (policy, field, reason) = match role {
        Role::Server => (job.server_restart_policy, "spec.ps.restartPolicy", "ServerFailed"),
        Role::Trainer => (job.restart_policy, "spec.trainer.restartPolicy", "TrainerFailed"),
    };
    let fatal = match policy {
        RestartPolicy::OnFailure => false,
        RestartPolicy::Never => true,
        RestartPolicy::ExitCode => failure.exit_code.is_some_and(|code| (1..128).contains(&code)),
    };
    fatal.then(|| Remedy::FailJob(reason, format!("{field} is {policy:?}, which ends the job")))
}

/// What a failed pod adds to its replica's record.
pub fn toll(job: &ValidJob, role: Role, pod: &ObservedPod, failure: &Failure) -> Toll {
    let Judgement { remedy, counts } = judge(job, Some(role), failure);
    let healthy = SignedDuration::from_secs(job.failure_policy.backoff.reset_after_seconds);
    let ran = failure.started.map_or(SignedDuration::ZERO, |started| failure.at.duration_since(started));
    let before = if ran >= healthy { 0 } else { pod.failures_in_a_row };
    // A restart of the whole job counts once, and when it is done.
    Toll { counts: counts && remedy != Remedy::RestartJob, in_a_row: Some(before + 1) }
}

/// How long to wait after so many ends in a row: not at all after the first, then longer each time.
pub fn back_off(policy: &Backoff, in_a_row: u32) -> SignedDuration {
    let Some(doublings) = in_a_row.checked_sub(2) else { return SignedDuration::ZERO };
    let seconds = policy.initial_seconds.saturating_mul(1 << doublings.min(40));
    SignedDuration::from_secs(seconds.min(policy.max_seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::fixtures::{at, pod, replica, valid_job};
    use crate::controller::observe::Life;

    const RULES: &str = "
failurePolicy:
  rules:
    - {name: usage, action: FailJob, onExitCodes: [2, 64], targetRoles: [trainer]}
    - {name: memory, action: RestartJob, onReasons: [OOMKilled]}
    - {name: flaky, action: RestartPod, countTowardsMax: false, onExitCodes: [42]}
    - {name: spot, action: FailJob, onPodConditions: [DisruptionTarget], targetRoles: [ps]}
    - {name: noise, action: Ignore, onExitCodes: [43], onReasons: [Error]}
    - {name: hang, action: FailJob, onReasons: [Stalled]}";

    fn failed(who: &str, code: i32, reason: &str, disruption: bool) -> Failure {
        let pod = if disruption { pod(replica(who)).disrupted(5) } else { pod(replica(who)).failed(5, code) };
        let Life::Failed(failure) = pod.life else { unreachable!("it failed") };
        Failure { reason: reason.into(), exit_code: Some(code), ..failure }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let job = valid_job(RULES);
        let rule = |name: &str| {
            Remedy::FailJob("FailurePolicyRule", format!("rule {name} of spec.failurePolicy says FailJob"))
        };
        let rows = [
            ("trainer-0", 2, "Error", false, rule("usage"), false),
            ("ps-0", 2, "Error", false, Remedy::RestartPod, true),
            ("trainer-0", 137, "OOMKilled", false, Remedy::RestartJob, true),
            ("trainer-0", 42, "Error", false, Remedy::RestartPod, false),
            ("trainer-0", 43, "Error", false, Remedy::RestartPod, false),
            ("trainer-0", 43, "Strange", false, Remedy::RestartPod, true),
            ("trainer-0", 2, "Evicted", true, Remedy::RestartPod, false),
            ("ps-0", 143, "Evicted", true, rule("spot"), false),
            ("trainer-0", 143, "Evicted", true, Remedy::RestartPod, false),
        ];
        for (who, code, reason, disruption, remedy, counts) in rows {
            let judgement = judge(&job, Some(replica(who).role), &failed(who, code, reason, disruption));
            assert_eq!(judgement, Judgement { remedy, counts }, "{who}: {code} {reason}, disruption {disruption}");
        }
        assert_eq!(judge(&job, None, &failed("ps-0", 0, STALLED, false)).remedy, rule("hang"));
    }

    #[test]
    fn without_a_rule_the_restart_policies_and_the_strategy_decide() {
        let all = valid_job("failurePolicy: {restartStrategy: RecreateAll}");
        let one = failed("trainer-0", 1, "Error", false);
        assert_eq!(judge(&all, Some(Role::Trainer), &one), Judgement { remedy: Remedy::RestartJob, counts: true });
        let gone = failed("trainer-0", 143, "Evicted", true);
        assert_eq!(judge(&all, Some(Role::Trainer), &gone), Judgement { remedy: Remedy::RestartJob, counts: false });
        let job = valid_job("ps: {restartPolicy: ExitCode}");
        let because = "spec.ps.restartPolicy is ExitCode, which ends the job".to_owned();
        let fatal = Remedy::FailJob("ServerFailed", because);
        assert_eq!(judge(&job, Some(Role::Server), &one).remedy, fatal);
        assert_eq!(judge(&job, Some(Role::Trainer), &one).remedy, Remedy::RestartPod);
        assert_eq!(judge(&job, None, &failed("ps-0", 0, STALLED, false)).remedy, Remedy::RestartJob);
    }

    #[test]
    fn the_wait_doubles_up_to_its_limit_and_a_healthy_while_resets_it() {
        let job = valid_job("failurePolicy: {backoff: {initialSeconds: 2, maxSeconds: 10, resetAfterSeconds: 100}}");
        let waits = (0..7).map(|n| back_off(&job.failure_policy.backoff, n).as_secs()).collect::<Vec<_>>();
        assert_eq!(waits, [0, 0, 2, 4, 8, 10, 10]);
        let in_a_row = |ran: i64| {
            let mut failure = failed("trainer-0", 1, "Error", false);
            failure.started = Some(at(5 - ran));
            toll(&job, Role::Trainer, &pod(replica("trainer-0")).born(4, 4, 4), &failure).in_a_row
        };
        assert_eq!((in_a_row(99), in_a_row(100)), (Some(5), Some(1)));
        assert_eq!(back_off(&job.failure_policy.backoff, u32::MAX).as_secs(), 10);
    }
}
