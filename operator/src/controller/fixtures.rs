//! Jobs and pods for the tests of this crate.

use jiff::Timestamp;
use psjobs_api::crd::ParameterServerJob;
use psjobs_api::{ReplicaResult, Role};

use super::observe::{Failure, ObservedPod, PodPhase, Replica};
use super::validate::{ValidJob, validate};

/// Builds the stored job `mnist` with 1 server and 2 trainers, whose pods are created together unless `spec`
/// says otherwise; `spec` is YAML, one more field a line.
pub fn job(spec: &str) -> ParameterServerJob {
    let startup = if spec.contains("startupPolicy") { "" } else { "startupPolicy: AnyOrder" };
    let yaml = format!(
        r"
apiVersion: psjobs.dev/v1alpha1
kind: ParameterServerJob
metadata: {{name: mnist, namespace: team, uid: 0b6c, generation: 1, resourceVersion: '1'}}
spec: {{}}
---
trainer:
  replicas: 2
  template: {{spec: {{containers: [{{name: trainer, image: 'psjobs-worker:0.1.0', args: [train, mnist]}}]}}}}
{startup}
{spec}"
    );
    let (object, spec) = yaml.split_once("---").expect("two documents");
    let mut object: serde_json::Value = serde_yaml::from_str(object).expect("object is YAML");
    object["spec"] = serde_yaml::from_str(spec).expect("spec is YAML");
    serde_json::from_value(object).expect("a job")
}

/// Builds [`job`] and validates it.
pub fn valid_job(spec: &str) -> ValidJob {
    validate(job(spec).into()).expect("valid")
}

/// Builds [`valid_job`] with another `spec.trainer`, indented by two.
pub fn valid_job_with_trainer(trainer: &str) -> ValidJob {
    let mut object = job("");
    object.spec.trainer = serde_yaml::from_str(trainer).expect("spec.trainer is YAML");
    validate(object.into()).expect("valid")
}

/// Returns second `n` of the tests' day.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).expect("in range")
}

/// Builds a pod of its first incarnation that has just been created.
pub fn pod(replica: Replica) -> ObservedPod {
    let name = psjobs_api::crd::names::pod("mnist", replica.role, replica.index);
    ObservedPod {
        uid: format!("uid-of-{name}-0"),
        name,
        incarnation: 0,
        failures: 0,
        failures_in_a_row: 0,
        failed_incarnation: None,
        phase: PodPhase::Pending,
        ready: false,
        alive: true,
        deletion_deadline: None,
        waiting_reason: None,
        ip: None,
        node: Some("n1".into()),
        node_lost: None,
    }
}

impl ObservedPod {
    pub fn born(mut self, incarnation: u32, failures: u32, failures_in_a_row: u32) -> Self {
        self.uid = format!("uid-of-{}-{incarnation}", self.name);
        Self { incarnation, failures, failures_in_a_row, ..self }
    }

    pub fn running(self) -> Self {
        Self { phase: PodPhase::Running, ready: true, waiting_reason: None, ..self }
    }

    pub fn succeeded(self, second: i64) -> Self {
        Self { phase: PodPhase::Succeeded { at: at(second), result: None }, ready: false, alive: false, ..self }
    }

    /// Returns the pod as one that ended well and left a result, of a server that saw the first pods of two trainers leave.
    pub fn concluded(self, second: i64) -> Self {
        self.concluded_with(second, r#"{"0": "0-1"}"#)
    }

    /// Returns the pod as one that ended well and left a result, of a server that saw these incarnations of trainers leave.
    pub fn concluded_with(self, second: i64, left: &str) -> Self {
        let result = format!(r#"{{"steps": 900, "examples": 14400, "seconds": 95.1, "left": {left}}}"#);
        let result = ReplicaResult::parse(&result);
        Self { phase: PodPhase::Succeeded { at: at(second), result }, ready: false, alive: false, ..self }
    }

    pub fn failed(self, second: i64, code: i32) -> Self {
        let failure = Failure {
            disruption: false,
            exit_code: Some(code),
            reason: "Error".into(),
            what: format!("ended with exit code {code}"),
            of_init_container: false,
            log_tail: "Error: no such file".into(),
            conditions: Vec::new(),
            started: Some(at(second - 1)),
            at: at(second),
        };
        Self { phase: PodPhase::Failed(failure), ready: false, alive: false, ..self }
    }

    pub fn disrupted(self, second: i64) -> Self {
        let failure = Failure {
            disruption: true,
            exit_code: None,
            reason: "Evicted".into(),
            what: "was stopped by its node".into(),
            of_init_container: false,
            log_tail: String::new(),
            conditions: vec!["DisruptionTarget".into()],
            started: Some(at(second - 1)),
            at: at(second),
        };
        Self { phase: PodPhase::Failed(failure), ready: false, alive: false, ..self }
    }

    /// Returns the pod as `observe` reads one that failed and is being deleted.
    pub fn failed_and_deleted(self, second: i64) -> Self {
        let pod = self.disrupted(second).deleted(second + 30);
        let PodPhase::Failed(failure) = pod.phase else { unreachable!("disrupted pods have failed") };
        Self { phase: PodPhase::Failed(Failure { reason: "PodDeleted".into(), ..failure }), ..pod }
    }

    pub fn on_lost_node(self, since: Timestamp) -> Self {
        Self { node_lost: Some(since), ..self }
    }

    pub fn deleted(self, deletion_deadline: i64) -> Self {
        Self { deletion_deadline: Some(at(deletion_deadline)), ..self }
    }
}

/// Parses `ps-0`, `trainer-1`.
pub fn replica(text: &str) -> Replica {
    let (role, index) = text.split_once('-').expect("role-index");
    Replica { role: Role::parse(role).expect("a role"), index: index.parse().expect("an index") }
}
