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
    let failure = Failure { role, disruption, exit_code: Some(code), reason, conditions: &conditions };
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
        assert_eq!(found, Response { action, counts }, "{role:?}: {code} {reason}, disruption {disruption}");
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
        assert_eq!(found, Response { action, counts }, "{spec}: {role:?} {code}, disruption {disruption}");
    }
}
