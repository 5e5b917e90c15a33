//! The cases themselves.

use super::Event::{Begin, Exit, Pass, Run, Step};
use super::State::{Active, Completing, Failed, Succeeded};
use super::{Case, State, Want};

const NEW: [Option<u32>; 3] = [Some(0), Some(0), Some(0)];

const fn want(state: State, started: [Option<u32>; 3], counted: u32) -> Want {
    Want { state, started, counted }
}

/// Every case.
pub const CASES: &[Case] = &[
    Case {
        name: "trainers start when the server is ready",
        spec: "",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Completing, NEW, 0)),
            (Exit("ps-0", 0, ""), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "all start at once if the startup policy says so",
        spec: "startupPolicy: AnyOrder",
        trainer: "",
        steps: &[(Begin, want(Active, NEW, 0))],
    },
    Case {
        name: "a failed trainer starts again, the second time after a second, until its restarts are used up",
        spec: "failurePolicy: {maxRestarts: 2}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-1", 1, "no"), want(Active, [Some(0), Some(0), Some(1)], 1)),
            (Run, want(Active, [Some(0), Some(0), Some(1)], 1)),
            (Exit("trainer-1", 1, "no"), want(Active, [Some(0), Some(0), Some(1)], 2)),
            (Pass(1), want(Active, [Some(0), Some(0), Some(2)], 2)),
            (Run, want(Active, [Some(0), Some(0), Some(2)], 2)),
            (Exit("ps-0", 3, "no"), want(Failed("spec.failurePolicy.maxRestarts"), [Some(0), Some(0), Some(2)], 2)),
        ],
    },
    Case {
        name: "the back-off is the spec's, and a healthy while resets it",
        spec: "failurePolicy: {maxRestarts: 9, backoff: {initialSeconds: 5, maxSeconds: 7, resetAfterSeconds: 100}}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 1, ""), want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Exit("trainer-0", 1, ""), want(Active, [Some(0), Some(1), Some(0)], 2)),
            (Pass(4), want(Active, [Some(0), Some(1), Some(0)], 2)),
            (Pass(1), want(Active, [Some(0), Some(2), Some(0)], 2)),
            (Run, want(Active, [Some(0), Some(2), Some(0)], 2)),
            (Exit("trainer-0", 1, ""), want(Active, [Some(0), Some(2), Some(0)], 3)),
            (Pass(6), want(Active, [Some(0), Some(2), Some(0)], 3)),
            (Pass(1), want(Active, [Some(0), Some(3), Some(0)], 3)),
            (Run, want(Active, [Some(0), Some(3), Some(0)], 3)),
            (Pass(100), want(Active, [Some(0), Some(3), Some(0)], 3)),
            (Exit("trainer-0", 1, ""), want(Active, [Some(0), Some(4), Some(0)], 4)),
        ],
    },
    Case {
        name: "restart policy Never of the trainers ends the job with its own reason, whatever the exit code",
        spec: "",
        trainer: "restartPolicy: Never",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("ps-0", 1, ""), want(Active, [Some(1), Some(0), Some(0)], 1)),
            (Run, want(Active, [Some(1), Some(0), Some(0)], 1)),
            (
                Exit("trainer-0", 2, "no data"),
                want(Failed("spec.trainer.restartPolicy is Never"), [Some(1), Some(0), Some(0)], 1),
            ),
        ],
    },
    Case {
        name: "restart policy ExitCode of the servers ends the job unless a signal killed one",
        spec: "ps: {restartPolicy: ExitCode}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 5, ""), want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Exit("ps-0", 137, ""), want(Active, [Some(1), Some(1), Some(0)], 2)),
            (Run, want(Active, [Some(1), Some(1), Some(0)], 2)),
            (Exit("ps-0", 1, ""), want(Failed("spec.ps.restartPolicy is ExitCode"), [Some(1), Some(1), Some(0)], 2)),
        ],
    },
    Case {
        name: "exit code 2 ends the job at once with what the program said",
        spec: "",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (
                Exit("trainer-1", 2, "psjobs-worker: there is no data at /data"),
                want(
                    Failed(
                        "ended with exit code 2, and that means wrong input, so it is not started again: there is no data at /data",
                    ),
                    NEW,
                    0,
                ),
            ),
        ],
    },
    Case {
        name: "a rule for exit code 2 comes first",
        spec: "failurePolicy: {rules: [{name: mine, action: RestartPod, onExitCodes: [2], targetRoles: [ps]}]}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("ps-0", 2, "later"), want(Active, [Some(1), Some(0), Some(0)], 1)),
            (Run, want(Active, [Some(1), Some(0), Some(0)], 1)),
            (Exit("trainer-0", 2, "no"), want(Failed("that means wrong input"), [Some(1), Some(0), Some(0)], 1)),
        ],
    },
    Case {
        name: "a trainer whose server is away is started again, and not counted",
        spec: "failurePolicy: {maxRestarts: 0}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (
                Exit("trainer-0", 75, "psjobs-worker: server ps-0 did not answer"),
                want(Active, [Some(0), Some(1), Some(0)], 0),
            ),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Exit("trainer-0", 75, ""), want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Exit("trainer-1", 75, ""), want(Active, [Some(0), Some(1), Some(1)], 0)),
            (Pass(1), want(Active, [Some(0), Some(2), Some(1)], 0)),
        ],
    },
    Case {
        name: "a server without trainers is started again, and not counted, whatever its restart policy",
        spec: "startupPolicy: AnyOrder\nps: {restartPolicy: Never}\nfailurePolicy: {maxRestarts: 0, restartStrategy: RecreateAll}",
        trainer: "restartPolicy: ExitCode",
        steps: &[
            (Begin, want(Active, NEW, 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("ps-0", 75, "psjobs-worker: no trainer was active"), want(Active, [Some(1), Some(0), Some(0)], 0)),
            (Run, want(Active, [Some(1), Some(0), Some(0)], 0)),
            (Exit("trainer-1", 75, ""), want(Active, [Some(1), Some(0), Some(1)], 0)),
        ],
    },
    Case {
        name: "a rule that names the exit code of a process whose peer is away decides, others pass it by",
        spec: "
failurePolicy:
  rules:
    - {name: any, action: FailJob, onReasons: [Error]}
    - {name: away, action: FailJob, onExitCodes: [75], targetRoles: [ps]}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 75, ""), want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Exit("ps-0", 75, ""), want(Failed("rule away of spec.failurePolicy"), [Some(0), Some(1), Some(0)], 0)),
        ],
    },
    Case {
        name: "a process whose peer is away does not stop the job's deadline",
        spec: "runPolicy: {activeDeadlineSeconds: 50}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 75, ""), want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Pass(50), want(Failed("was active for 50 s"), [Some(0), Some(1), Some(0)], 0)),
        ],
    },
    Case {
        name: "a rule ends the job, restarts it, or looks away",
        spec: "
failurePolicy:
  maxRestarts: 0
  rules:
    - {name: usage, action: FailJob, onExitCodes: [64], targetRoles: [trainer]}
    - {name: flaky, action: Ignore, onExitCodes: [42]}
    - {name: together, action: RestartJob, countTowardsMax: false, onExitCodes: [43], onReasons: [Error]}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 42, ""), want(Active, [Some(0), Some(1), Some(0)], 0)),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 0)),
            // Every replica's next incarnation is higher than all before; trainers wait for the server again.
            (Exit("trainer-1", 43, ""), want(Active, [Some(2), Some(1), Some(0)], 0)),
            (Run, want(Active, [Some(2), Some(2), Some(2)], 0)),
            (Exit("trainer-1", 64, ""), want(Failed("rule usage of spec.failurePolicy"), [Some(2); 3], 0)),
        ],
    },
    Case {
        name: "all replicas start again after a failure, which counts once and waits the second time",
        spec: "startupPolicy: AnyOrder\nfailurePolicy: {restartStrategy: RecreateAll, maxRestarts: 2}",
        trainer: "",
        steps: &[
            (Begin, want(Active, NEW, 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("ps-0", 1, ""), want(Active, [Some(1); 3], 1)),
            (Run, want(Active, [Some(1); 3], 1)),
            (Exit("trainer-1", 1, ""), want(Active, [Some(1); 3], 1)),
            (Pass(1), want(Active, [Some(2); 3], 2)),
            (Run, want(Active, [Some(2); 3], 2)),
            (Exit("trainer-1", 1, ""), want(Failed("spec.failurePolicy.maxRestarts"), [Some(2); 3], 2)),
        ],
    },
    Case {
        name: "the success of trainer 0 is the job's",
        spec: "successPolicy: {operator: RankZero}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Completing, NEW, 0)),
            (Exit("ps-0", 0, ""), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "what still runs when enough trainers are done is stopped, trainers first",
        spec: "successPolicy: {operator: Any}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "servers that do not end are stopped after the drain",
        spec: "runPolicy: {serverDrainSeconds: 20}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Completing, NEW, 0)),
            (Pass(19), want(Completing, NEW, 0)),
            (Pass(1), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "a job with checkpoints whose trainers make no step fails after the drain",
        spec: "checkpoint: {volumeClaim: {size: 1Gi}}
runPolicy: {serverDrainSeconds: 20}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Completing, NEW, 0)),
            (Pass(19), want(Completing, NEW, 0)),
            (Step(0), want(Completing, NEW, 0)),
            (Pass(1), want(Failed("made no step"), NEW, 0)),
        ],
    },
    Case {
        name: "a job whose server 0 does not say how many steps were made waits for its word",
        spec: "checkpoint: {volumeClaim: {size: 1Gi}}
runPolicy: {serverDrainSeconds: 20}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Completing, NEW, 0)),
            (Pass(300), want(Completing, NEW, 0)),
            (Step(0), want(Failed("made no step"), NEW, 0)),
        ],
    },
    Case {
        name: "a job with checkpoints whose trainers made steps waits for its model",
        spec: "checkpoint: {volumeClaim: {size: 1Gi}}
runPolicy: {serverDrainSeconds: 20}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Step(3), want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Completing, NEW, 0)),
            (Pass(3600), want(Completing, NEW, 0)),
            (Exit("ps-0", 0, ""), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "a server that ends long before the trainers has failed",
        spec: "",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("ps-0", 0, ""), want(Active, NEW, 0)),
            (Pass(29), want(Active, NEW, 0)),
            (Pass(1), want(Active, [Some(1), Some(0), Some(0)], 1)),
        ],
    },
    Case {
        name: "a job that is active for too long fails",
        spec: "runPolicy: {activeDeadlineSeconds: 50}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Pass(49), want(Active, NEW, 0)),
            (Pass(1), want(Failed("was active for 50 s"), NEW, 0)),
        ],
    },
    Case {
        name: "a job whose server is not ready in time fails",
        spec: "runPolicy: {startupDeadlineSeconds: 40}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Pass(39), want(Active, [Some(0), None, None], 0)),
            (Pass(1), want(Failed("did not run within the 40 s"), [Some(0), None, None], 0)),
        ],
    },
    Case {
        name: "once a job has run its start has no deadline",
        spec: "runPolicy: {startupDeadlineSeconds: 40}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Pass(10), want(Active, NEW, 0)),
            (Exit("ps-0", 1, ""), want(Active, [Some(1), Some(0), Some(0)], 1)),
            (Pass(100), want(Active, [Some(1), Some(0), Some(0)], 1)),
        ],
    },
    Case {
        name: "a job that makes no step starts again, then fails",
        spec: "startupPolicy: AnyOrder\nrunPolicy: {progressDeadlineSeconds: 60}\nfailurePolicy: {maxRestarts: 1}",
        trainer: "",
        steps: &[
            (Begin, want(Active, NEW, 0)),
            (Run, want(Active, NEW, 0)),
            (Step(7), want(Active, NEW, 0)),
            (Pass(50), want(Active, NEW, 0)),
            (Step(8), want(Active, NEW, 0)),
            (Pass(59), want(Active, NEW, 0)),
            (Step(8), want(Active, NEW, 0)),
            (Pass(1), want(Active, [Some(1); 3], 1)),
            (Run, want(Active, [Some(1); 3], 1)),
            (Step(1), want(Active, [Some(1); 3], 1)),
            (Pass(59), want(Active, [Some(1); 3], 1)),
            (Step(1), want(Active, [Some(1); 3], 1)),
            (Pass(1), want(Failed("made no step for 60 s"), [Some(1); 3], 1)),
        ],
    },
    Case {
        name: "a rule says what becomes of a job that makes no step",
        spec: "
runPolicy: {progressDeadlineSeconds: 60}
failurePolicy: {rules: [{name: hang, action: FailJob, onReasons: [Stalled]}]}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Step(7), want(Active, NEW, 0)),
            (Pass(59), want(Active, NEW, 0)),
            (Step(7), want(Active, NEW, 0)),
            (Pass(1), want(Failed("rule hang of spec.failurePolicy"), NEW, 0)),
        ],
    },
    Case {
        name: "silence of server 0 is no lack of steps",
        spec: "runPolicy: {progressDeadlineSeconds: 60}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Step(7), want(Active, NEW, 0)),
            (Pass(90), want(Active, NEW, 0)),
            (Step(8), want(Active, NEW, 0)),
        ],
    },
    Case {
        name: "an elastic job gives up a trainer that has no restart left, and needs the first",
        spec: "elasticPolicy: {minReplicas: 1, maxReplicas: 2}\nfailurePolicy: {maxRestarts: 0}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-1", 1, ""), want(Active, NEW, 0)),
            (Exit("trainer-0", 1, ""), want(Failed("spec.failurePolicy.maxRestarts"), NEW, 0)),
        ],
    },
    Case {
        name: "an elastic job whose work is done starts no spare trainer again",
        spec: "elasticPolicy: {minReplicas: 1, maxReplicas: 2}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-0", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-1", 1, ""), want(Completing, NEW, 0)),
            (Exit("ps-0", 0, ""), want(Succeeded, NEW, 0)),
        ],
    },
    Case {
        name: "an elastic job waits for its first trainer, even if others are done",
        spec: "elasticPolicy: {minReplicas: 1, maxReplicas: 2}",
        trainer: "",
        steps: &[
            (Begin, want(Active, [Some(0), None, None], 0)),
            (Run, want(Active, NEW, 0)),
            (Exit("trainer-1", 0, ""), want(Active, NEW, 0)),
            (Exit("trainer-0", 1, ""), want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Run, want(Active, [Some(0), Some(1), Some(0)], 1)),
            (Exit("trainer-0", 0, ""), want(Completing, [Some(0), Some(1), Some(0)], 1)),
        ],
    },
];
