use super::*;
use crate::cases::policy;
use crate::deadlines::STALLED;

const RULES: &str = "
failurePolicy:
  rules:
    - {name: usage, action: FailJob, onExitCodes: [3, 64], targetRoles: [trainer]}
    - {name: memory, action: RestartJob, onReasons: [OOMKilled]}
    - {name: flaky, action: RestartPod, countTowardsMax: false, onExitCodes: [42]}
    - {name: spot, action: FailJob, onPodConditions: [DisruptionTarget], targetRoles: [ps]}
    - {name: noise, action: Ignore, onExitCodes: [43], onReasons: [Error]}
    - {name: hang, action: FailJob, onReasons: [Stalled]}";

const SERVER: Option<Role> = Some(Role::Server);
const TRAINER: Option<Role> = Some(Role::Trainer);

/// A replica that ended with an exit code, or was taken away.
fn respond(spec: &str, role: Option<Role>, code: i32, reason: &str, disruption: bool) -> Response {
    let conditions = if disruption { vec!["DisruptionTarget".to_owned()] } else { Vec::new() };
    let exit_code = Some(code);
    let failure = Failure { role, disruption, exit_code, reason, conditions: &conditions, log_tail: Some("no data") };
    policy(spec).respond_to(&failure)
}

#[test]
fn the_first_rule_that_matches_decides() {
    use Action::{RestartJob, RestartReplica};
    let rule = |name: &str| Action::FailJob {
        reason: "FailurePolicyRule",
        because: format!("rule {name} of spec.failurePolicy says FailJob"),
    };
    let rows = [
        (TRAINER, 3, "Error", false, rule("usage"), false),
        (SERVER, 3, "Error", false, RestartReplica, true),
        (TRAINER, 137, "OOMKilled", false, RestartJob, true),
        (TRAINER, 42, "Error", false, RestartReplica, false),
        (TRAINER, 43, "Error", false, RestartReplica, false),
        (TRAINER, 43, "Strange", false, RestartReplica, true),
        (TRAINER, 3, "Evicted", true, RestartReplica, false),
        (SERVER, 143, "Evicted", true, rule("spot"), false),
        (TRAINER, 143, "Evicted", true, RestartReplica, false),
        (None, 0, STALLED, false, rule("hang"), false),
    ];
    for (role, code, reason, disruption, action, counts) in rows {
        let found = respond(RULES, role, code, reason, disruption);
        assert_eq!(
            (found.action, found.counts, found.has_other_cause),
            (action, counts, disruption),
            "{role:?}: {code} {reason}, disruption {disruption}"
        );
    }
}

#[test]
fn without_a_rule_the_restart_policies_and_the_strategy_decide() {
    use Action::{RestartJob, RestartReplica};
    let all = "failurePolicy: {restartStrategy: RecreateAll}";
    let ends = "spec.ps.restartPolicy is ExitCode, which ends the job".to_owned();
    let ends = Action::FailJob { reason: "ServerFailed", because: ends };
    let by_code = "ps: {restartPolicy: ExitCode}";
    let rows = [
        (all, TRAINER, 1, false, RestartJob, true),
        (all, TRAINER, 143, true, RestartJob, false),
        (by_code, SERVER, 1, false, ends, false),
        (by_code, SERVER, 137, false, RestartReplica, true),
        (by_code, TRAINER, 1, false, RestartReplica, true),
        (by_code, None, 0, false, RestartJob, true),
    ];
    for (spec, role, code, disruption, action, counts) in rows {
        let found = respond(spec, role, code, "Error", disruption);
        assert_eq!(
            (found.action, found.counts, found.has_other_cause),
            (action, counts, disruption),
            "{spec}: {role:?} {code}, disruption {disruption}"
        );
    }
}

fn wrong_input(sentence: &str) -> Action {
    let because = format!("that means wrong input, so it is not started again{sentence}");
    Action::FailJob { reason: "WrongInput", because }
}

#[test]
fn exit_code_2_ends_the_job_unless_the_spec_says_otherwise() {
    let says = || wrong_input(": no data");
    let never = "spec.ps.restartPolicy is Never, which ends the job".to_owned();
    let never = Action::FailJob { reason: "ServerFailed", because: never };
    let rule = "failurePolicy: {rules: [{name: mine, action: RestartPod, onExitCodes: [2]}]}";
    let rows = [
        ("", TRAINER, 2, false, says(), false),
        ("", SERVER, 2, false, says(), false),
        ("failurePolicy: {restartStrategy: RecreateAll}", TRAINER, 2, false, says(), false),
        ("elasticPolicy: {maxReplicas: 2}", TRAINER, 2, false, says(), false),
        (rule, TRAINER, 2, false, Action::RestartReplica, true),
        ("ps: {restartPolicy: Never}", SERVER, 2, false, never, false),
        ("", TRAINER, 2, true, Action::RestartReplica, false),
        ("", TRAINER, 1, false, Action::RestartReplica, true),
        ("", TRAINER, 130, false, Action::RestartReplica, true),
    ];
    for (spec, role, code, disruption, action, counts) in rows {
        let found = respond(spec, role, code, "Error", disruption);
        assert_eq!(
            (found.action, found.counts, found.has_other_cause),
            (action, counts, disruption),
            "{spec}: {role:?} {code}, disruption {disruption}"
        );
    }
    // A container that prepares the replica, as one that fetches data, may have other meanings for it.
    let failure = Failure {
        role: TRAINER,
        disruption: false,
        exit_code: Some(2),
        reason: "Error",
        conditions: &[],
        log_tail: None,
    };
    assert_eq!(policy("").respond_to(&failure).action, Action::RestartReplica);
}

#[test]
fn a_process_whose_peer_is_away_is_started_again_and_not_to_blame() {
    let all = "ps: {restartPolicy: Never}\nfailurePolicy: {restartStrategy: RecreateAll}";
    let broad =
        "failurePolicy: {rules: [{name: all, action: FailJob, onReasons: [Error], targetRoles: [ps, trainer]}]}";
    for (spec, role) in [("", TRAINER), (all, SERVER), (all, TRAINER), (broad, SERVER)] {
        let want = Response { action: Action::RestartReplica, counts: false, has_other_cause: true };
        assert_eq!(respond(spec, role, 75, "Error", false), want, "{spec}: {role:?}");
    }
    let named = "failurePolicy: {rules: [{name: mine, action: RestartPod, onExitCodes: [75]}]}";
    let want = Response { action: Action::RestartReplica, counts: true, has_other_cause: false };
    assert_eq!(respond(named, TRAINER, 75, "Error", false), want, "a rule that names the code decides");
    // A container that prepares the replica has no peer of the job.
    let failure = Failure {
        role: TRAINER,
        disruption: false,
        exit_code: Some(75),
        reason: "Error",
        conditions: &[],
        log_tail: None,
    };
    assert!(policy("").respond_to(&failure).counts);
}

#[test]
fn the_sentence_is_the_last_error_or_the_last_line() {
    let rows = [
        (
            "INFO started\npsjobs-worker: there is no data at /data; run `make mnist`\n\n",
            ": there is no data at /data; run `make mnist`",
        ),
        (
            "error: unexpected argument '--epoch' found\n\n  tip: a similar argument exists: '--epochs'\n\nUsage: psjobs-worker \
             train mlp\n\nFor more information, try '--help'.\n",
            ": unexpected argument '--epoch' found",
        ),
        (
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x",
            ": train.py: error: unrecognized arguments: --x",
        ),
        ("sh: 1: Syntax error", ": sh: 1: Syntax error"),
        (" \n", "; it wrote nothing"),
    ];
    for (log, want) in rows {
        assert_eq!(super::wrong_input(log), wrong_input(want), "{log:?}");
    }
    let Action::FailJob { because, .. } = super::wrong_input(&"ä".repeat(5000)) else { panic!("it ends the job") };
    assert!(because.chars().count() < 1100, "a line without an end is cut");
}
