//! The messages of each rule for a manifest that breaks it, and manifests that break none.

/// A change to the manifest as a merge patch in YAML (`null` removes), and the sentence it leads to.
pub type Row = (&'static str, &'static str);

/// Rows for the schema of fields: type, range, presence.
pub const SCHEMA: &[Row] = &[
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
    (
        "spec: {ps: {placement: Beside}}",
        r#"spec.ps.placement: Unsupported value: "Beside": supported values: "Separate", "Colocated""#,
    ),
    ("spec: {ps: {connections: 17}}", "spec.ps.connections in body should be less than or equal to 16"),
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
        "spec: {training: {batch: {microBatches: 0}}}",
        "spec.training.batch.microBatches in body should be greater than or equal to 1",
    ),
    (
        "spec: {training: {precision: {autocast: FP16}}}",
        r#"spec.training.precision.autocast: Unsupported value: "FP16": supported values: "None", "BF16""#,
    ),
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

/// Rows for the rules between fields.
pub const RULES: &[Row] = &[
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
        "spec: {elasticPolicy: {maxReplicas: 4}, training: {consistency: {mode: Sync, exactRecovery: true}}}",
        "spec.elasticPolicy does not go with spec.training.consistency.exactRecovery: its steps have no one result; remove one of the two",
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
        "spec.checkpoint needs one of volumeClaim, for example {size: 1Gi}, existingClaim, the name of one, and objectStore, for example {url: 's3://bucket/folder'}",
    ),
    (
        "spec: {checkpoint: {existingClaim: shared, objectStore: {url: 's3://bucket/folder'}}}",
        "spec.checkpoint needs one of volumeClaim, for example {size: 1Gi}, existingClaim, the name of one, and objectStore, for example {url: 's3://bucket/folder'}",
    ),
    (
        "spec: {checkpoint: {objectStore: {url: 's3://bucket/folder'}, path: ../other}}",
        "spec.checkpoint.objectStore.url and path are folders of a bucket: remove empty parts, . and .., and the letters ?, # and @",
    ),
    (
        "spec: {checkpoint: {objectStore: {url: 's3://bucket/../other'}}}",
        "spec.checkpoint.objectStore.url and path are folders of a bucket: remove empty parts, . and .., and the letters ?, # and @",
    ),
    (
        "spec: {tracking: {mlflow: {uri: 'mlflow:5000'}}}",
        "spec.tracking.mlflow.uri must be an address with http:// or https:// and without the letters ?, # and @, for example http://mlflow.mlflow:5000; credentials belong to secret",
    ),
    (
        "spec: {tracking: {mlflow: {uri: 'https://user:password@mlflow'}}}",
        "spec.tracking.mlflow.uri must be an address with http:// or https:// and without the letters ?, # and @, for example http://mlflow.mlflow:5000; credentials belong to secret",
    ),
    (
        "spec: {ps: {replicationFactor: 2}}",
        "spec.ps.replicationFactor 2 needs two servers; set spec.ps.replicas to 2 or more, or remove it",
    ),
    ("spec: {ps: {placement: Colocated, replicas: 3}}", A_SERVER_EACH),
    ("spec: {ps: {placement: Colocated}, trainer: {replicas: 129}}", A_SERVER_EACH),
    ("spec: {ps: {placement: Colocated, replicationFactor: 2}, trainer: {replicas: 1}}", A_SERVER_EACH),
    (
        "spec: {ps: {placement: Colocated}, elasticPolicy: {maxReplicas: 4}}",
        "spec.ps.placement Colocated does not go with spec.elasticPolicy: the number of servers cannot change, and a trainer that leaves would take its server along; remove one of the two",
    ),
    (
        "spec: {ps: {placement: Colocated}, successPolicy: {operator: Any}}",
        "spec.ps.placement Colocated needs all trainers to the end, because their pods have the servers; remove spec.successPolicy.operator, or spec.ps.placement",
    ),
    (
        "spec: {ps: {placement: Colocated}, schedulingPolicy: {backend: Volcano, minAvailable: 3}}",
        "spec.schedulingPolicy.minAvailable is above the number of servers and trainers, so they could never start; write a smaller one",
    ),
    (
        "spec: {ps: {placement: Colocated, template: {spec: {containers: [{name: a, image: i}, {name: b, image: i}]}}}}",
        ONE_CONTAINER,
    ),
    (
        "spec: {ps: {placement: Colocated, template: {spec: {nodeSelector: {a: b}, containers: [{name: a, image: i}]}}}}",
        ONE_CONTAINER,
    ),
    (
        "spec: {ps: {placement: Colocated, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: a, image: i}]}}}}",
        ONE_CONTAINER,
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
        "spec: {training: {consistency: {exactRecovery: true}}}",
        "spec.training.consistency.exactRecovery is for Sync without backupTrainers, where a step has one result; remove it",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, backupTrainers: 1, exactRecovery: true}}}",
        "spec.training.consistency.exactRecovery is for Sync without backupTrainers, where a step has one result; remove it",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, staleness: 2}}}",
        "spec.training.consistency.staleness is the bound of Bounded; remove it, or set mode to Bounded",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, overlap: true}}}",
        "spec.training.consistency.overlap is for Async and Bounded, as in Sync no gradient is stale; remove it, or set mode to Async or Bounded",
    ),
    (
        "spec: {training: {consistency: {overlap: true}, local: {steps: 8}}}",
        "spec.training.consistency.overlap is for trainers that exchange in every step, with local they make steps alone; remove it, or write local.overlap instead",
    ),
    (
        "spec: {training: {consistency: {mode: Sync}, staleness: {policy: Damped}}}",
        "spec.training.staleness.policy: nothing is stale in Sync; remove it, or set consistency.mode to Bounded or Async",
    ),
    (
        "spec: {training: {consistency: {mode: Sync}, staleness: {momentum: PerTrainer}}}",
        "spec.training.staleness.momentum: in Sync there is one momentum, of the mean of the trainers' gradients; remove it, or set consistency.mode to Bounded or Async",
    ),
    (
        "spec: {training: {optimizer: {type: Adam}, staleness: {momentum: Shared}}}",
        "spec.training.staleness.momentum: only SGD without spec.training.local can have its momentum at the trainers; remove it",
    ),
    (
        "spec: {training: {local: {steps: 50}, staleness: {momentum: PerTrainer}}}",
        "spec.training.staleness.momentum: only SGD without spec.training.local can have its momentum at the trainers; remove it",
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
        "spec: {training: {batch: {base: 32, microBatches: 5}}}",
        "spec.training.batch.base must be a multiple of microBatches, which have one size; write a number of micro-batches that divides base",
    ),
    (
        "spec: {training: {consistency: {mode: Sync, backupTrainers: 1}, batch: {adaptive: true}}}",
        "spec.training.batch.adaptive gives a slow trainer fewer examples, backupTrainers leave its gradients out; remove one of the two",
    ),
    (
        "spec: {training: {local: {steps: 8}, batch: {adaptive: true}}}",
        "spec.training.batch.adaptive deals out the examples of each step, with local trainers make their steps alone; remove one of the two",
    ),
    ("spec: {training: {local: {steps: 0}}}", "spec.training.local.steps in body should be greater than or equal to 1"),
    ("spec: {training: {local: {momentum: 0.5}}}", "spec.training.local.steps: Required value"),
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
        "spec: {training: {optimizer: {type: FTRL, groups: [{parameters: '*.bias', weightDecay: 0.1}]}}}",
        "spec.training.optimizer.groups: FTRL has no weightDecay; remove it",
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
pub const CHANGES: &[Row] = &[
    (
        "spec: {checkpoint: {existingClaim: other}}",
        "spec.checkpoint cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    (
        "spec: {tracking: {mlflow: {uri: 'http://other:5000'}}}",
        "spec.tracking cannot change while the job runs, because its servers know it from their start; set spec.suspend to true first, or create a new job",
    ),
    ("spec: {training: {optimizer: {learningRate: 0.5}}}", START_CHANGED),
    (
        "{spec: {training: {optimizer: {learningRate: 0.5}}}, status: {phase: Failed, progress: {step: 7}}}",
        START_CHANGED,
    ),
    ("{spec: {trainer: {gpus: 1}}, status: {phase: Failed}}", START_CHANGED),
    ("spec: {ps: {replicas: 2}}", START_CHANGED),
    (
        "spec: {schedulingPolicy: {queue: team-a}}",
        "spec.schedulingPolicy cannot change while the job runs; set spec.suspend to true first, or create a new job",
    ),
    ("spec: {trainer: {replicas: 3}}", START_CHANGED),
    ("spec: {trainer: {template: {metadata: {labels: {team: blue}}}}}", START_CHANGED),
    ("spec: {trainer: {gpus: 1}}", START_CHANGED),
    ("spec: {trainer: {gpuResourceName: example.com/gpu}}", START_CHANGED),
    ("spec: {trainer: {restartPolicy: Never}}", START_CHANGED),
    ("spec: {elasticPolicy: {maxReplicas: 4}}", ELASTIC_CHANGED),
];

const A_SERVER_EACH: &str = "spec.ps.placement Colocated puts a server beside each trainer: leave spec.ps.replicas out, or write as many as spec.trainer.replicas, which is then at most 128 and at least spec.ps.replicationFactor";
const ONE_CONTAINER: &str = "spec.ps.template: with placement Colocated it may have one container and spec.terminationGracePeriodSeconds only, because the pod is the trainer's; write the rest to spec.trainer.template";
pub const START_CHANGED: &str = "spec.training, spec.ps and spec.trainer cannot change while the job runs, but for trainer.replicas of a job with elasticPolicy; set spec.suspend to true first, or create a new job";
const ELASTIC_CHANGED: &str = "spec.elasticPolicy cannot change while the job runs, because its processes know it from their start; set spec.suspend to true first, or create a new job";
pub const NOT_BETWEEN: &str = "spec.trainer.replicas must lie between spec.elasticPolicy.minReplicas and maxReplicas; write a number between them";

/// Changes of an elastic job of 2 to 4 trainers.
pub const ELASTIC_CHANGES: &[Row] = &[
    ("spec: {trainer: {replicas: 1}}", NOT_BETWEEN),
    ("spec: {trainer: {replicas: 5}}", NOT_BETWEEN),
    ("spec: {trainer: {replicas: 3, gpus: 1}}", START_CHANGED),
    ("spec: {elasticPolicy: {maxReplicas: 5}}", ELASTIC_CHANGED),
    ("spec: {elasticPolicy: null}", ELASTIC_CHANGED),
    ("spec: {ps: {replicas: 2}}", START_CHANGED),
];

/// Changes that are refused even while the job is suspended.
pub const NEVER: &[Row] = &[
    ("spec: {managedBy: kueue.x-k8s.io/multikueue}", "spec.managedBy cannot change; create a new job"),
    ("spec: {network: {networkPolicy: true}}", "spec.network cannot change; create a new job"),
];

/// Manifests on the right side of a rule's edge.
pub const ACCEPTED: &[&str] = &[
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
    "spec: {failurePolicy: {backoff: {initialSeconds: 1, maxSeconds: 3600, resetAfterSeconds: 60}, rules: [{name: a, action: Ignore, onPodConditions: [DisruptionTarget]}]}}",
    "spec: {ps: {template: {spec: {containers: [{name: server, image: i}]}}}}",
    "spec: {checkpoint: {volumeClaim: {size: 1Gi, accessMode: ReadWriteMany, storageClassName: fast}}}",
    "spec: {checkpoint: {existingClaim: shared, path: runs/7, intervalSeconds: 30, keep: 5, resume: false}}",
    "spec: {checkpoint: {objectStore: {url: 's3://bucket/jobs/a', secret: keys}}}",
    "spec: {checkpoint: {objectStore: {url: 'gs://bucket'}, path: runs/7}}",
    "spec: {tracking: {mlflow: {uri: 'http://mlflow.mlflow:5000', experiment: digits, secret: keys}}}",
    "spec: {tracking: {mlflow: {uri: 'https://mlflow.example.com/path/'}}}",
    "spec: {ps: {replicas: 2, replicationFactor: 2, connections: 2}}",
    "spec: {ps: {placement: Colocated, replicationFactor: 2}}",
    "spec: {ps: {placement: Colocated, replicas: 2}, schedulingPolicy: {backend: Volcano, minAvailable: 2}}",
    "spec: {ps: {placement: Colocated, template: {spec: {terminationGracePeriodSeconds: 9, containers: [{name: server, image: i}]}}}}",
    "spec: {ps: {placement: Separate}}",
    "spec: {runPolicy: {cleanPodPolicy: None, activeDeadlineSeconds: 1, startupDeadlineSeconds: 1, progressDeadlineSeconds: 1, forceDeleteAfterSeconds: 0}}",
    "spec: {trainer: {gpus: 2, gpuResourceName: nvidia.com/mig-1g.5gb, restartPolicy: Never}}",
    "spec: {training: {nonFinite: Skip, seed: 7, compression: {codec: TopK, density: 0.01}}}",
    "spec: {training: {consistency: {mode: Sync, backupTrainers: 1}}}",
    "spec: {training: {consistency: {mode: Sync, exactRecovery: true}}}",
    "spec: {training: {consistency: {exactRecovery: false}}}",
    "spec: {training: {consistency: {overlap: true}}}",
    "spec: {training: {consistency: {mode: Bounded, staleness: 2, overlap: true}, batch: {base: 32, adaptive: true}}}",
    "spec: {elasticPolicy: {maxReplicas: 4}, training: {consistency: {overlap: true}}}",
    "spec: {training: {consistency: {mode: Sync, overlap: false}, local: {steps: 8, overlap: true}}}",
    "spec: {training: {consistency: {mode: Sync}, local: {steps: 50}, optimizer: {type: AdamW}}}",
    "spec: {elasticPolicy: {maxReplicas: 4}, training: {local: {steps: 1000000, overlap: true, learningRate: 1, momentum: 0}}}",
    "spec: {training: {consistency: {mode: Bounded, staleness: 4}, staleness: {policy: Damped, coefficient: 0.1}}}",
    "spec: {training: {optimizer: {momentum: 0.9}, staleness: {policy: Inverse, momentum: Shared}}}",
    "spec: {training: {consistency: {mode: Bounded}, optimizer: {momentum: 0.9}, staleness: {momentum: PerTrainer}}}",
    "spec: {training: {consistency: {mode: Sync}, batch: {base: 32, adaptive: true, min: 8, max: 64}}}",
    "spec: {training: {batch: {base: 32, microBatches: 4}, precision: {autocast: BF16, tf32: true}}}",
    "spec: {training: {batch: {base: 32, adaptive: true, microBatches: 32}, precision: {autocast: None, tf32: false}}}",
    "spec: {training: {schedule: {type: Step, stepSize: 100, gamma: 0.5, warmupSteps: 10}}}",
    "spec: {training: {schedule: {type: Cosine, totalSteps: 1000, end: 0.001}}}",
    "spec: {training: {optimizer: {type: AdamW, learningRate: 0.001, weightDecay: 0.01, beta1: 0.8, beta2: 0.9, epsilon: 0.1, amsgrad: true}}}",
    "spec: {training: {optimizer: {type: RMSprop, alpha: 0.9, centered: true}}}",
    "spec: {training: {optimizer: {type: FTRL, groups: [{parameters: '*.bias', weightDecay: 0, learningRateFactor: 0.5}]}}}",
    "spec: {training: {optimizer: {type: Adagrad, learningRateDecay: 0.1, initialAccumulator: 0.1}}}",
    "spec: {schedulingPolicy: {backend: None}}",
    "spec: {failurePolicy: {restartStrategy: RecreateAll, backoff: {initialSeconds: 60}, rules: [{name: a, action: FailJob, onExitCodes: [1, 255], targetRoles: [ps, trainer]}, {name: b, action: Ignore, onReasons: [Evicted], countTowardsMax: false}]}}",
    "spec: {training: {optimizer: {type: SGD, momentum: 0.9, nesterov: true}}}",
    "spec: {training: {optimizer: {type: FTRL, beta: 0.5, l1: 0.1, l2: 0.1}}}",
    "spec: {elasticPolicy: {minReplicas: 2, maxReplicas: 2}}",
    "spec: {elasticPolicy: {maxReplicas: 4096}, training: {consistency: {mode: Sync}}, ps: {replicas: 2}, schedulingPolicy: {backend: Volcano, queue: gold, minAvailable: 3}}",
];

/// Changes that a running job takes.
pub const ACCEPTED_CHANGES: &[&str] = &[
    "spec: {suspend: true}",
    "spec: {failurePolicy: {maxRestarts: 9}}",
    "spec: {runPolicy: {activeDeadlineSeconds: 9}}",
];
