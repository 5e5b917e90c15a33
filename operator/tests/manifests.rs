//! What a user reads when a manifest cannot work: one row for each rule, judged by a real API server
//! as `kubectl apply` asks it to. A rule without a row fails the last test here.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams, PostParams};
use psjobs_api::crd::ParameterServerJob;
use psjobs_operator::controller::validate::validate;
use serde_json::{Value, json};
use support::Team;

/// A manifest that every rule lets through; the rows change it.
const GOOD: &str = r#"
apiVersion: psjobs.dev/v1alpha1
kind: ParameterServerJob
metadata: {name: mnist}
spec:
  trainer:
    replicas: 2
    template: {spec: {containers: [{name: trainer, image: "psjobs-worker:0.1.0", args: [train, mnist]}]}}
"#;

/// A change to the manifest as a merge patch in YAML (`null` removes), and the sentence it leads to.
type Row = (&'static str, &'static str);

/// What the schema says about a field: its type, its range, whether it must be there.
const SCHEMA: &[Row] = &[
    ("spec: {trainer: null}", "spec.trainer: Required value"),
    ("spec: {trainer: {template: null}}", "spec.trainer.template: Required value"),
    ("spec: {trainer: {replica: 2}}", r#"strict decoding error: unknown field "spec.trainer.replica""#),
    ("spec: {optimizer: {}}", r#"strict decoding error: unknown field "spec.optimizer""#),
    (
        "spec: {trainer: {replicas: 0}}",
        "spec.trainer.replicas: Invalid value: 0: spec.trainer.replicas in body should be greater than or equal to 1",
    ),
    (
        "spec: {trainer: {replicas: 4097}}",
        "spec.trainer.replicas: Invalid value: 4097: spec.trainer.replicas in body should be less than or equal to 4096",
    ),
    (
        "spec: {trainer: {replicas: two}}",
        r#"spec.trainer.replicas: Invalid value: "string": spec.trainer.replicas in body must be of type integer: "string""#,
    ),
    ("spec: {trainer: {gpus: -1}}", "spec.trainer.gpus in body should be greater than or equal to 0"),
    ("spec: {trainer: {gpus: 65}}", "spec.trainer.gpus in body should be less than or equal to 64"),
    ("spec: {trainer: {gpuResourceName: ''}}", "spec.trainer.gpuResourceName in body should be at least 1 chars long"),
    (
        "spec: {trainer: {restartPolicy: Always}}",
        r#"spec.trainer.restartPolicy: Unsupported value: "Always": supported values: "OnFailure", "Never", "ExitCode""#,
    ),
    ("spec: {ps: {replicas: 0}}", "spec.ps.replicas in body should be greater than or equal to 1"),
    ("spec: {ps: {replicationFactor: 3}}", "spec.ps.replicationFactor in body should be less than or equal to 2"),
    ("spec: {ps: {replicas: 129}}", "spec.ps.replicas in body should be less than or equal to 128"),
    (
        "spec: {failurePolicy: {maxRestarts: -1}}",
        "spec.failurePolicy.maxRestarts in body should be greater than or equal to 0",
    ),
    (
        "spec: {runPolicy: {cleanPodPolicy: Some}}",
        r#"spec.runPolicy.cleanPodPolicy: Unsupported value: "Some": supported values: "All", "Running", "None""#,
    ),
    (
        "spec: {runPolicy: {ttlSecondsAfterFinished: -1}}",
        "spec.runPolicy.ttlSecondsAfterFinished in body should be greater than or equal to 0",
    ),
    (
        "spec: {runPolicy: {activeDeadlineSeconds: 0}}",
        "spec.runPolicy.activeDeadlineSeconds in body should be greater than or equal to 1",
    ),
    (
        "spec: {runPolicy: {serverDrainSeconds: 86401}}",
        "spec.runPolicy.serverDrainSeconds in body should be less than or equal to 86400",
    ),
    (
        "spec: {runPolicy: {startupDeadlineSeconds: 0}}",
        "spec.runPolicy.startupDeadlineSeconds in body should be greater than or equal to 1",
    ),
    (
        "spec: {runPolicy: {progressDeadlineSeconds: 0}}",
        "spec.runPolicy.progressDeadlineSeconds in body should be greater than or equal to 1",
    ),
    (
        "spec: {runPolicy: {forceDeleteAfterSeconds: -1}}",
        "spec.runPolicy.forceDeleteAfterSeconds in body should be greater than or equal to 0",
    ),
    (
        "spec: {startupPolicy: TrainersFirst}",
        r#"spec.startupPolicy: Unsupported value: "TrainersFirst": supported values: "ServersReady", "AnyOrder""#,
    ),
    (
        "spec: {successPolicy: {operator: Most}}",
        r#"spec.successPolicy.operator: Unsupported value: "Most": supported values: "All", "Any", "RankZero""#,
    ),
    (
        "spec: {ps: {restartPolicy: Always}}",
        r#"spec.ps.restartPolicy: Unsupported value: "Always": supported values: "OnFailure", "Never", "ExitCode""#,
    ),
    (
        "spec: {failurePolicy: {restartStrategy: Everything}}",
        r#"spec.failurePolicy.restartStrategy: Unsupported value: "Everything": supported values: "FailedPod", "RecreateAll""#,
    ),
    (
        "spec: {failurePolicy: {rules: [{name: a, action: Retry}]}}",
        r#"spec.failurePolicy.rules[0].action: Unsupported value: "Retry": supported values: "FailJob", "RestartPod", "RestartJob", "Ignore""#,
    ),
    (
        "spec: {failurePolicy: {rules: [{name: a, action: Ignore}, {name: a, action: FailJob}]}}",
        r#"spec.failurePolicy.rules[1]: Duplicate value: {"name":"a"}"#,
    ),
    ("spec: {failurePolicy: {rules: [{action: Ignore}]}}", "spec.failurePolicy.rules[0].name: Required value"),
    (
        "spec: {failurePolicy: {rules: [{name: a, action: Ignore, onExitCodes: [0]}]}}",
        "spec.failurePolicy.rules[0].onExitCodes[0] in body should be greater than or equal to 1",
    ),
    (
        "spec: {failurePolicy: {rules: [{name: a, action: Ignore, onExitCodes: [256]}]}}",
        "spec.failurePolicy.rules[0].onExitCodes[0] in body should be less than or equal to 255",
    ),
    (
        "spec: {failurePolicy: {rules: [{name: a, action: Ignore, targetRoles: [workers]}]}}",
        r#"spec.failurePolicy.rules[0].targetRoles[0]: Unsupported value: "workers": supported values: "ps", "trainer""#,
    ),
    (
        "spec: {schedulingPolicy: {scheduleTimeoutSeconds: 0}}",
        "spec.schedulingPolicy.scheduleTimeoutSeconds in body should be greater than or equal to 1",
    ),
    (
        "spec: {training: {consistency: {mode: Eventually}}}",
        r#"spec.training.consistency.mode: Unsupported value: "Eventually": supported values: "Sync", "#,
    ),
    (
        "spec: {training: {optimizer: {learningRate: -1}}}",
        "spec.training.optimizer.learningRate in body should be greater than or equal to 0",
    ),
    ("spec: {training: {batch: {base: 0}}}", "spec.training.batch.base in body should be greater than or equal to 1"),
    (
        "spec: {schedulingPolicy: {backend: Slurm}}",
        r#"spec.schedulingPolicy.backend: Unsupported value: "Slurm": supported values: "None", "Workload", "Volcano", "Coscheduling""#,
    ),
    (
        "spec: {schedulingPolicy: {backend: Volcano, minAvailable: 0}}",
        "spec.schedulingPolicy.minAvailable in body should be greater than or equal to 1",
    ),
    ("spec: {elasticPolicy: {minReplicas: 1}}", "spec.elasticPolicy.maxReplicas: Required value"),
    (
        "spec: {elasticPolicy: {minReplicas: 0, maxReplicas: 4}}",
        "spec.elasticPolicy.minReplicas in body should be greater than or equal to 1",
    ),
    (
        "spec: {elasticPolicy: {maxReplicas: 4097}}",
        "spec.elasticPolicy.maxReplicas in body should be less than or equal to 4096",
    ),
    ("spec: {training: {seed: -1}}", "spec.training.seed in body should be greater than or equal to 0"),
];

/// What the rules between fields say.
const RULES: &[Row] = &[
    ("spec: {elasticPolicy: {maxReplicas: 1}}", NOT_BETWEEN),
    ("spec: {elasticPolicy: {minReplicas: 3, maxReplicas: 4}}", NOT_BETWEEN),
    (
        "spec: {elasticPolicy: {minReplicas: 3, maxReplicas: 2}}",
        "spec.elasticPolicy.minReplicas is above maxReplicas; write a smaller one, or raise maxReplicas",
    ),
    (
        "spec: {elasticPolicy: {maxReplicas: 4}, training: {consistency: {mode: Sync, backupTrainers: 1}}}",
        "spec.elasticPolicy does not go with spec.training.consistency.backupTrainers, whose number is of a fixed count of trainers; remove one of the two",
    ),
    (
        "spec: {elasticPolicy: {maxReplicas: 4}, training: {batch: {adaptive: true}}}",
        "spec.elasticPolicy does not go with spec.training.batch.adaptive: its work is dealt out in batches of one size, of which a fast trainer takes more; remove one of the two",
    ),
    (
        "spec: {elasticPolicy: {maxReplicas: 4}, schedulingPolicy: {backend: Volcano, minAvailable: 3}}",
        "spec.schedulingPolicy.minAvailable is above the servers and spec.elasticPolicy.minReplicas, so a job scaled down could not start again; write a smaller one, or remove it",
    ),
    (
        "spec: {elasticPolicy: {maxReplicas: 4}, schedulingPolicy: {queue: team-a}}",
        "spec.schedulingPolicy.queue: Kueue admits groups of a fixed size, and an elastic job has none; remove queue or spec.elasticPolicy, or use a queue of Volcano",
    ),
    (
        "spec: {checkpoint: {}}",
        "spec.checkpoint needs either volumeClaim, for example {size: 1Gi}, or existingClaim, the name of one",
    ),
    (
        "spec: {ps: {replicationFactor: 2}}",
        "spec.ps.replicationFactor 2 needs two servers; set spec.ps.replicas to 2 or more, or remove it",
    ),
    (
        "spec: {schedulingPolicy: {minAvailable: 2}}",
        "spec.schedulingPolicy.minAvailable needs somebody who schedules pods together; set backend to Workload, Volcano or Coscheduling, or remove it",
    ),
    (
        "spec: {schedulingPolicy: {backend: None, minAvailable: 2}}",
        "spec.schedulingPolicy.minAvailable needs somebody who schedules pods together; set backend to Workload, Volcano or Coscheduling, or remove it",
    ),
    (
        "spec: {schedulingPolicy: {backend: None, queue: team-a}}",
        "spec.schedulingPolicy.queue: the backend None has no queues; remove one of the two (without a backend it is a queue of Kueue)",
    ),
    (
        "spec: {schedulingPolicy: {backend: Volcano, minAvailable: 4}}",
        "spec.schedulingPolicy.minAvailable is above the number of servers and trainers, so they could never start; write a smaller one",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, backupTrainers: 2}}}",
        "spec.training.consistency.backupTrainers must be less than spec.trainer.replicas, so that somebody trains; write a smaller one",
    ),
    (
        "spec: {training: {consistency: {backupTrainers: 1}}}",
        "spec.training.consistency.backupTrainers is for Sync; remove it, or set mode to Sync",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, staleness: 2}}}",
        "spec.training.consistency.staleness is the bound of Bounded; remove it, or set mode to Bounded",
    ),
    (
        "spec: {training: {consistency: {mode: Sync}, staleness: {policy: Damped}}}",
        "spec.training.staleness.policy: nothing is stale in Sync; remove it, or set consistency.mode to Bounded or Async",
    ),
    (
        "spec: {training: {batch: {max: 64}}}",
        "spec.training.batch: min and max are the bounds of an adaptive batch; remove them, or set adaptive to true",
    ),
    (
        "spec: {training: {batch: {adaptive: true, min: 33}}}",
        "spec.training.batch.base must lie between min and max; write bounds around it, or remove them",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, backupTrainers: 1}, batch: {adaptive: true}}}",
        "spec.training.batch.adaptive gives a slow trainer fewer examples, backupTrainers leave its gradients out; remove one of the two",
    ),
    (
        "spec: {training: {schedule: {type: Cosine}}}",
        "spec.training.schedule.totalSteps: Linear and Cosine need to know where they end; write the steps of one trainer, for example 10000",
    ),
    (
        "spec: {training: {compression: {codec: BF16, density: 0.5}}}",
        "spec.training.compression.density is for TopK; remove it, or set codec to TopK",
    ),
    (
        "metadata: {name: 1st-try}",
        "metadata.name must start with a letter and hold only a-z, 0-9 and '-', because services are named after it; for example mnist-1",
    ),
    (
        "metadata: {name: this-name-is-so-long-that-its-pods-names-do-not-fit}",
        "metadata.name must be at most 50 characters long, so that pod names such as NAME-trainer-4095 fit 63; shorten it",
    ),
    (
        "spec: {trainer: {template: {spec: {containers: []}}}}",
        "spec.trainer.template.spec.containers needs a container; write for example [{name: trainer, image: psjobs-worker:0.1.0, args: [train, mnist]}]",
    ),
    (
        "spec: {trainer: {template: {spec: null}}}",
        "spec.trainer.template.spec.containers needs a container; write for example [{name: trainer, image: psjobs-worker:0.1.0, args: [train, mnist]}]",
    ),
    (
        "spec: {ps: {template: {spec: {containers: []}}}}",
        "spec.ps.template.spec.containers needs a container; remove the template to use the default one",
    ),
    (
        "spec: {failurePolicy: {backoff: {initialSeconds: 61}}}",
        "spec.failurePolicy.backoff.initialSeconds is above maxSeconds; write a smaller one, or raise maxSeconds",
    ),
    (
        "spec: {successPolicy: {minSucceeded: 1}}",
        "spec.successPolicy.minSucceeded is for the operator Any; remove it, or set operator to Any",
    ),
    (
        "spec: {successPolicy: {operator: Any, minSucceeded: 3}}",
        "spec.successPolicy.minSucceeded is above spec.trainer.replicas, so the job could never succeed; write a smaller one",
    ),
    (
        "spec: {training: {optimizer: {nesterov: true}}}",
        "spec.training.optimizer.nesterov needs momentum; set momentum above 0, for example 0.9, or remove nesterov",
    ),
    (
        "spec: {training: {optimizer: {type: Adam, momentum: 0.9}}}",
        "spec.training.optimizer.momentum is an argument of SGD and RMSprop; remove it, or use one of these types",
    ),
    (
        "spec: {training: {optimizer: {type: RMSprop, momentum: 0.9, nesterov: true}}}",
        "spec.training.optimizer.nesterov is an argument of SGD; remove it, or use type SGD",
    ),
    (
        "spec: {training: {optimizer: {type: FTRL, weightDecay: 0.1}}}",
        "spec.training.optimizer: FTRL has no weightDecay; write l2 instead",
    ),
    (
        "spec: {training: {optimizer: {type: SGD, beta1: 0.8}}}",
        "spec.training.optimizer: beta1, beta2 and amsgrad are arguments of Adam and AdamW; remove them, or use one of these types",
    ),
    (
        "spec: {training: {optimizer: {type: FTRL, epsilon: 0.1}}}",
        "spec.training.optimizer: SGD and FTRL have no epsilon; remove it",
    ),
    (
        "spec: {training: {optimizer: {type: Adam, centered: true}}}",
        "spec.training.optimizer: alpha and centered are arguments of RMSprop; remove them, or use type RMSprop",
    ),
    (
        "spec: {training: {optimizer: {type: Adam, initialAccumulator: 0.1}}}",
        "spec.training.optimizer: learningRateDecay and initialAccumulator are arguments of Adagrad; remove them, or use type Adagrad",
    ),
    (
        "spec: {training: {optimizer: {type: Adagrad, l1: 0.1}}}",
        "spec.training.optimizer: beta, l1 and l2 are arguments of FTRL; remove them, or use type FTRL",
    ),
];

/// Changes to a stored job that runs: the change, and the sentence.
const CHANGES: &[Row] = &[
    (
        "spec: {checkpoint: {existingClaim: other}}",
        "spec.checkpoint cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    (
        "spec: {training: {optimizer: {learningRate: 0.5}}}",
        "spec.training cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    (
        "spec: {ps: {replicas: 2}}",
        "spec.ps cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    (
        "spec: {schedulingPolicy: {queue: team-a}}",
        "spec.schedulingPolicy cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    (
        "spec: {trainer: {replicas: 3}}",
        "spec.trainer.replicas cannot change while the job runs; set spec.suspend to true first, or create a new job with spec.elasticPolicy",
    ),
    ("spec: {trainer: {template: {metadata: {labels: {team: blue}}}}}", TRAINER_CHANGED),
    ("spec: {trainer: {gpus: 1}}", TRAINER_CHANGED),
    ("spec: {trainer: {gpuResourceName: example.com/gpu}}", TRAINER_CHANGED),
    ("spec: {trainer: {restartPolicy: Never}}", TRAINER_CHANGED),
    ("spec: {elasticPolicy: {maxReplicas: 4}}", ELASTIC_CHANGED),
];

const TRAINER_CHANGED: &str = "spec.trainer cannot change while the job runs, but for replicas of an elastic job; set spec.suspend to true first, or create a new job";
const ELASTIC_CHANGED: &str = "spec.elasticPolicy cannot change while the job runs, because its processes know it from their start; set spec.suspend to true first, or create a new job";
const NOT_BETWEEN: &str = "spec.trainer.replicas must lie between spec.elasticPolicy.minReplicas and maxReplicas; write a number between them";

/// The same for an elastic job of 2 to 4 trainers.
const ELASTIC_CHANGES: &[Row] = &[
    ("spec: {trainer: {replicas: 1}}", NOT_BETWEEN),
    ("spec: {trainer: {replicas: 5}}", NOT_BETWEEN),
    ("spec: {trainer: {replicas: 3, gpus: 1}}", TRAINER_CHANGED),
    ("spec: {elasticPolicy: {maxReplicas: 5}}", ELASTIC_CHANGED),
    ("spec: {elasticPolicy: null}", ELASTIC_CHANGED),
    (
        "spec: {ps: {replicas: 2}}",
        "spec.ps cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
];

/// Changes that are refused even while the job is suspended.
const NEVER: &[Row] = &[
    ("spec: {managedBy: kueue.x-k8s.io/multikueue}", "spec.managedBy cannot change; create a new job"),
    ("spec: {network: {networkPolicy: true}}", "spec.network cannot change; create a new job"),
];

/// Manifests on the right side of a rule's edge.
const ACCEPTED: &[&str] = &[
    "{}",
    "metadata: {name: x23456789-123456789-123456789-123456789-123456789}",
    "spec: {suspend: true, ps: {replicas: 128}, trainer: {replicas: 4096, gpus: 64}}",
    "spec: {failurePolicy: {maxRestarts: 0}, runPolicy: {ttlSecondsAfterFinished: 0, serverDrainSeconds: 0}}",
    "spec: {managedBy: kueue.x-k8s.io/multikueue, startupPolicy: AnyOrder}",
    "spec: {successPolicy: {operator: Any, minSucceeded: 2}}",
    "spec: {successPolicy: {operator: RankZero}, ps: {restartPolicy: ExitCode}}",
    "spec: {schedulingPolicy: {scheduleTimeoutSeconds: 60, priorityClassName: high, topologyKey: zone, queue: team-a}}",
    "spec: {schedulingPolicy: {backend: Volcano, queue: team-a, minAvailable: 3}, network: {networkPolicy: true}}",
    "spec: {network: {mutualTLS: false}}",
    "spec: {schedulingPolicy: {backend: None}}",
    "spec: {failurePolicy: {restartStrategy: RecreateAll, backoff: {initialSeconds: 60}, rules: [{name: a, action: FailJob, onExitCodes: [1, 255], targetRoles: [ps, trainer]}, {name: b, action: Ignore, onReasons: [Evicted], countTowardsMax: false}]}}",
    "spec: {training: {optimizer: {type: SGD, momentum: 0.9, nesterov: true}}}",
    "spec: {training: {optimizer: {type: FTRL, l1: 0.1, l2: 0.1}}}",
    "spec: {elasticPolicy: {minReplicas: 2, maxReplicas: 2}}",
    "spec: {elasticPolicy: {maxReplicas: 4096}, training: {consistency: {mode: Sync}}, ps: {replicas: 2}, schedulingPolicy: {backend: Volcano, queue: gold, minAvailable: 3}}",
];

/// Changes that a running job takes.
const ACCEPTED_CHANGES: &[&str] = &[
    "spec: {suspend: true}",
    "spec: {failurePolicy: {maxRestarts: 9}}",
    "spec: {runPolicy: {activeDeadlineSeconds: 9}}",
];

#[tokio::test]
async fn manifests_that_cannot_work_are_refused_with_a_sentence() {
    let Some(team) = Team::new("manifests").await else { return };
    let mut wrong = String::new();
    for &(change, sentence) in SCHEMA.iter().chain(RULES) {
        expect_refusal(&mut wrong, change, create(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn manifests_at_the_edge_of_a_rule_are_accepted() {
    let Some(team) = Team::new("edges").await else { return };
    for change in ACCEPTED {
        create(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
}

#[tokio::test]
async fn changes_that_a_running_job_cannot_follow_are_refused_until_it_is_suspended() {
    let Some(team) = Team::new("changes").await else { return };
    team.apply("").await;
    let mut wrong = String::new();
    for &(change, sentence) in CHANGES.iter().chain(NEVER) {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
    for change in ACCEPTED_CHANGES {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
    team.patch(json!({"suspend": true})).await;
    for &(change, _) in CHANGES {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} of a suspended job was refused: {said}"));
    }
    for &(change, sentence) in NEVER {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn a_running_elastic_job_takes_another_number_of_trainers_and_nothing_else() {
    let Some(team) = Team::new("elastic-changes").await else { return };
    team.apply("elasticPolicy: {minReplicas: 2, maxReplicas: 4}").await;
    let mut wrong = String::new();
    for &(change, sentence) in ELASTIC_CHANGES {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
    for change in ["spec: {trainer: {replicas: 4}}", "spec: {failurePolicy: {maxRestarts: 9}}"] {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
    team.patch(json!({"suspend": true})).await;
    for change in ["spec: {elasticPolicy: {maxReplicas: 5}, trainer: {replicas: 5}}", "spec: {elasticPolicy: null}"] {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} of a suspended job was refused: {said}"));
    }
    let between = update(&team, "spec: {trainer: {replicas: 5}}").await;
    expect_refusal(&mut wrong, "5 trainers of a suspended job", between, NOT_BETWEEN);
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn kubectl_scale_changes_the_trainers_of_a_suspended_job() {
    let Some(team) = Team::new("scale").await else { return };
    team.apply("").await;
    let three = Patch::Merge(json!({"spec": {"replicas": 3}}));
    let jobs = team.api::<psjobs_api::crd::ParameterServerJob>();
    let params = PatchParams::default();
    let set = || jobs.patch_scale("mnist", &params, &three);
    let Err(kube::Error::Api(refused)) = set().await else { panic!("a running job was scaled") };
    assert!(refused.message.contains("spec.trainer.replicas cannot change while the job runs"), "{}", refused.message);
    team.patch(json!({"suspend": true})).await;
    let scale = set().await.expect("a suspended job can be scaled");
    assert_eq!(scale.spec.and_then(|spec| spec.replicas), Some(3));
    assert_eq!(team.job().await.spec.trainer.replicas, 3);
}

#[tokio::test]
async fn manifests_of_the_first_version_still_work() {
    let Some(team) = Team::new("yesterday").await else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests-0.1.0");
    let mut files =
        fs::read_dir(folder).expect("a folder").map(|file| file.expect("readable").path()).collect::<Vec<_>>();
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).expect("readable");
        let said: Value = serde_yaml::from_str(&text).expect("YAML");
        let accepted = send(&team, http::Method::POST, "", "application/json", &said).await;
        assert_eq!(accepted, Ok(()), "{}", file.display());
        // What is stored means what was written, and the operator can run it.
        let job: ParameterServerJob = serde_json::from_value(said.clone()).expect("a job");
        let stored = team.api().create(&PostParams::default(), &job).await.expect("it is stored");
        let means = serde_json::to_value(&stored.spec).expect("JSON");
        assert!(contains(&means, &said["spec"]), "{}: {means:#} instead of {said:#}", file.display());
        validate(stored.into()).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// Whether everything that `part` says is in `whole`.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| contains(whole, part)))
        }
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (Value::Number(whole), Value::Number(part)) => whole.as_f64() == part.as_f64(),
        (whole, part) => whole == part,
    }
}

#[test]
fn every_rule_has_a_row() {
    let text = include_str!("../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: CustomResourceDefinition = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let mut rules = Vec::new();
    messages(&serde_json::to_value(definition).expect("a definition is JSON"), &mut rules);
    assert!(rules.len() > 20, "rules are found: {rules:?}");
    let rows = RULES.iter().chain(CHANGES).chain(NEVER).map(|(_, sentence)| *sentence).collect::<Vec<_>>();
    let missing = rules.iter().filter(|rule| !rows.contains(&rule.as_str())).collect::<Vec<_>>();
    assert!(missing.is_empty(), "no row provokes {missing:#?}");
}

/// Collects what the rules of a definition say.
fn messages(schema: &Value, found: &mut Vec<String>) {
    if let Some(rules) = schema.get("x-kubernetes-validations").and_then(Value::as_array) {
        found.extend(rules.iter().filter_map(|rule| Some(rule.get("message")?.as_str()?.to_owned())));
    }
    match schema {
        Value::Object(fields) => fields.values().for_each(|field| messages(field, found)),
        Value::Array(items) => items.iter().for_each(|item| messages(item, found)),
        _ => {}
    }
}

fn expect_refusal(wrong: &mut String, change: &str, answer: Result<(), String>, sentence: &str) {
    match answer {
        Ok(()) => writeln!(wrong, "{change}\n  was accepted\n").expect("a String takes all text"),
        Err(said) if said.contains(sentence) => {}
        Err(said) => writeln!(wrong, "{change}\n  {said}\n").expect("a String takes all text"),
    }
}

/// What the API server says to the changed manifest; nothing is stored.
async fn create(team: &Team, change: &str) -> Result<(), String> {
    let mut job: Value = serde_yaml::from_str(GOOD).expect("the manifest is YAML");
    merge(&mut job, &serde_yaml::from_str(change).expect("the change is YAML"));
    send(team, http::Method::POST, "", "application/json", &job).await
}

/// What it says to a change of the stored job `mnist`; nothing is stored.
async fn update(team: &Team, change: &str) -> Result<(), String> {
    let change: Value = serde_yaml::from_str(change).expect("the change is YAML");
    send(team, http::Method::PATCH, "/mnist", "application/merge-patch+json", &change).await
}

async fn send(team: &Team, method: http::Method, name: &str, content: &str, body: &Value) -> Result<(), String> {
    let jobs = format!("/apis/psjobs.dev/v1alpha1/namespaces/{}/parameterserverjobs", team.namespace);
    let request = http::Request::builder()
        .method(method)
        .uri(format!("{jobs}{name}?dryRun=All&fieldValidation=Strict"))
        .header(http::header::CONTENT_TYPE, content)
        .body(body.to_string().into_bytes())
        .expect("a request");
    match team.client.request_text(request).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err(status.message.clone()),
        Err(error) => panic!("the API server does not answer: {error}"),
    }
}

/// RFC 7396.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let fields = target.as_object_mut().expect("made one above");
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name).or_insert(Value::Null), change);
        }
    }
}
