//! Jobs and pods for the tests of this crate.

use jiff::Timestamp;
use psjobs_api::Role;
use psjobs_api::crd::ParameterServerJob;

use super::observe::{Failure, Life, ObservedPod, Replica};
use super::validate::{ValidJob, validate};

/// The stored job `mnist` with 1 server and 2 trainers, whose pods are created together unless `spec`
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

/// [`job`], validated.
pub fn valid_job(spec: &str) -> ValidJob {
    validate(job(spec).into()).expect("valid")
}

/// [`valid_job`] with another `spec.trainer`, indented by two.
pub fn valid_job_with_trainer(trainer: &str) -> ValidJob {
    let mut object = job("");
    object.spec.trainer = serde_yaml::from_str(trainer).expect("spec.trainer is YAML");
    validate(object.into()).expect("valid")
}

/// Second `n` of the tests' day.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).expect("in range")
}

/// A pod of its first incarnation that has just been created.
pub fn pod(replica: Replica) -> ObservedPod {
    let name = psjobs_api::crd::names::pod("mnist", replica.role, replica.index);
    ObservedPod {
        uid: format!("uid-of-{name}-0"),
        name,
        incarnation: 0,
        failures: 0,
        failures_in_a_row: 0,
        life: Life::Pending,
        ready: false,
        alive: true,
        gone_by: None,
        obstacle: None,
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
        Self { life: Life::Running, ready: true, obstacle: None, ..self }
    }

    pub fn succeeded(self, second: i64) -> Self {
        Self { life: Life::Succeeded { at: at(second), result: None }, ready: false, alive: false, ..self }
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
        Self { life: Life::Failed(failure), ready: false, alive: false, ..self }
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
        Self { life: Life::Failed(failure), ready: false, alive: false, ..self }
    }

    /// As `observe` tells a failed pod that is being deleted.
    pub fn failed_and_deleted(self, second: i64) -> Self {
        let pod = self.disrupted(second).deleted(second + 30);
        let Life::Failed(failure) = pod.life else { unreachable!("disrupted pods have failed") };
        Self { life: Life::Failed(Failure { reason: "PodDeleted".into(), ..failure }), ..pod }
    }

    pub fn on_lost_node(self, since: Timestamp) -> Self {
        Self { node_lost: Some(since), ..self }
    }

    pub fn deleted(self, gone_by: i64) -> Self {
        Self { gone_by: Some(at(gone_by)), ..self }
    }
}

/// `ps-0`, `trainer-1`.
pub fn replica(text: &str) -> Replica {
    let (role, index) = text.split_once('-').expect("role-index");
    Replica { role: Role::parse(role).expect("a role"), index: index.parse().expect("an index") }
}
