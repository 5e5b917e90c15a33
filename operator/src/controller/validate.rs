//! Checks the stored object, so that the rest of the operator can rely on its values. The schema and its rules have
//! refused nearly all invalid objects; the check is needed because an object may have been stored under an older
//! definition.

use std::sync::Arc;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource as _, ResourceExt as _};
use psjobs_api::Role;
use psjobs_api::crd::{
    AccessMode, CleanPodPolicy, ElasticPolicy, ParameterServerJob, ParameterServerJobSpec, ParameterServerJobStatus,
    SuccessOperator, names,
};
use psjobs_api::training::TrainingError;
use psjobs_policy::{Elastic, JobPolicy};

use super::observe::Replica;

const MOST_TRAINERS: u32 = 4096;

/// A job whose values are all valid.
#[derive(Clone, Debug)]
pub struct ValidJob {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub generation: Option<i64>,
    pub owner: OwnerReference,
    pub suspended: bool,
    pub servers: u32,
    pub trainers: u32,
    /// Each trainer has a server in its pod.
    pub colocated: bool,
    /// The policies about failures, successes and time.
    pub policy: JobPolicy,
    pub clean_pod_policy: CleanPodPolicy,
    pub ttl_after_finished: Option<SignedDuration>,
    pub schedule_timeout: Option<SignedDuration>,
    pub force_delete_after: SignedDuration,
    pub server_drain: SignedDuration,
    /// The object itself, for its templates and spec.training.
    pub object: Arc<ParameterServerJob>,
}

/// Why a stored job cannot be run; the text names the field and what to write.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    #[error("metadata.{0} is missing; the API server sets it on every stored object")]
    Metadata(&'static str),
    #[error("{field} is {value}; write a number from {low} to {high}")]
    Range { field: &'static str, value: i64, low: i64, high: i64 },
    #[error("{0}.template.spec.containers is empty; write at least one container, the first is the {0}'s program")]
    NoContainer(&'static str),
    #[error(transparent)]
    Training(#[from] TrainingError),
}

impl ValidJob {
    /// Returns every replica that the job wants, in the order of ranks.
    pub fn replicas(&self) -> impl Iterator<Item = Replica> + use<> {
        (0..self.servers).map(Replica::server).chain((0..self.trainers).map(Replica::trainer))
    }

    pub fn count(&self, role: Role) -> u32 {
        if role == Role::Server { self.servers } else { self.trainers }
    }

    /// Returns the number of replicas that a role may have. Pods get this number in their environment, so that it
    /// stays right when the job is scaled.
    pub fn places(&self, role: Role) -> u32 {
        self.policy.elastic.filter(|_| role == Role::Trainer).map_or(self.count(role), |elastic| elastic.max)
    }

    /// Returns the number of pods of a job with so many trainers.
    pub fn pods(&self, trainers: u32) -> u32 {
        if self.colocated { trainers } else { self.servers + trainers }
    }

    /// Returns the host of a server, by which trainers and other servers find it.
    pub fn server_host(&self, index: u32) -> String {
        names::host(&self.name, &self.namespace, self.object.spec.pod_role(Role::Server), index)
    }

    /// Returns the number of trainers that the job needs to train.
    pub fn least_trainers(&self) -> u32 {
        self.policy.elastic.map_or(self.trainers, |elastic| elastic.min)
    }

    /// Returns the name of the Secret with the certificates of pods that are created now; `None`: they talk without
    /// TLS.
    pub fn certificates(&self) -> Option<String> {
        self.certificates_under(self.object.status.as_ref())
    }

    /// Returns the name of that Secret for pods that are created under this status. The pods keep what they started
    /// with until all of them start again, even if the spec differs: an earlier operator, which created no
    /// certificates, may have started them.
    pub fn certificates_under(&self, status: Option<&ParameterServerJobStatus>) -> Option<String> {
        match status {
            Some(status) if status.start_time.is_some() => status.certificates.clone(),
            status => self.new_certificates(status.map_or(0, |status| status.first_incarnation)),
        }
    }

    /// Returns the name of that Secret for pods that all start again with this incarnation.
    pub fn new_certificates(&self, first_incarnation: i32) -> Option<String> {
        let name = || names::certificates(&self.name, &self.uid, first_incarnation.unsigned_abs());
        self.object.spec.network.mutual_tls.then(name)
    }

    /// Returns true if the servers must run on one node: the volume that the operator makes for their checkpoints can be
    /// mounted by the pods of one node only.
    pub fn servers_share_node(&self) -> bool {
        let claim = self.object.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.volume_claim.as_ref());
        self.servers > 1 && claim.is_some_and(|claim| claim.access_mode == AccessMode::ReadWriteOnce)
    }

    /// Returns true if each server holds a copy of what another one holds.
    pub fn servers_are_replicated(&self) -> bool {
        self.object.spec.ps.replication_factor > 1
    }

    /// Returns the incarnation that the job's pods began with when all of them last started.
    pub fn first_incarnation(&self) -> u32 {
        self.object.status.as_ref().map_or(0, |status| status.first_incarnation.unsigned_abs())
    }

    /// Returns the rank of a replica in the job.
    pub fn rank(&self, replica: Replica) -> u32 {
        replica.rank(self.servers)
    }
}

/// Checks a stored job.
pub fn validate(object: Arc<ParameterServerJob>) -> Result<ValidJob, SpecError> {
    let spec = &object.spec;
    spec.training.validate()?;
    if !has_container(Some(&spec.trainer.template)) {
        return Err(SpecError::NoContainer("spec.trainer"));
    }
    if spec.ps.template.is_some() && !has_container(spec.ps.template.as_ref()) {
        return Err(SpecError::NoContainer("spec.ps"));
    }
    let run_policy = &spec.run_policy;
    let elastic = spec.elastic_policy.as_ref().map(elastic).transpose()?;
    let Elastic { min, max } = elastic.unwrap_or(Elastic { min: 1, max: MOST_TRAINERS });
    let trainers = number("spec.trainer.replicas", spec.trainer.replicas, min, max)?;
    Ok(ValidJob {
        name: object.name_any(),
        namespace: object.namespace().ok_or(SpecError::Metadata("namespace"))?,
        uid: object.uid().ok_or(SpecError::Metadata("uid"))?,
        generation: object.metadata.generation,
        owner: OwnerReference {
            // So that deleting the job in the foreground waits for its pods.
            block_owner_deletion: Some(true),
            ..object.controller_owner_ref(&()).ok_or(SpecError::Metadata("uid"))?
        },
        suspended: spec.suspend,
        servers: number("spec.ps.replicas", spec.servers(), 1, 128)?,
        trainers,
        colocated: spec.is_colocated(),
        policy: policy(spec, trainers)?,
        clean_pod_policy: run_policy.clean_pod_policy,
        ttl_after_finished: optional("spec.runPolicy.ttlSecondsAfterFinished", run_policy.ttl_seconds_after_finished)?,
        schedule_timeout: optional(
            "spec.schedulingPolicy.scheduleTimeoutSeconds",
            spec.scheduling_policy.as_ref().and_then(|policy| policy.schedule_timeout_seconds),
        )?,
        force_delete_after: duration("spec.runPolicy.forceDeleteAfterSeconds", run_policy.force_delete_after_seconds)?,
        server_drain: duration("spec.runPolicy.serverDrainSeconds", run_policy.server_drain_seconds)?,
        object,
    })
}

fn elastic(policy: &ElasticPolicy) -> Result<Elastic, SpecError> {
    let max = number("spec.elasticPolicy.maxReplicas", policy.max_replicas, 1, MOST_TRAINERS)?;
    Ok(Elastic { min: number("spec.elasticPolicy.minReplicas", policy.min_replicas, 1, max)?, max })
}

/// Reads the job's policy, after a check of the numbers in it.
fn policy(spec: &ParameterServerJobSpec, trainers: u32) -> Result<JobPolicy, SpecError> {
    if let (SuccessOperator::Any, Some(enough)) = (spec.success_policy.operator, spec.success_policy.min_succeeded) {
        number("spec.successPolicy.minSucceeded", enough, 1, trainers)?;
    }
    number("spec.failurePolicy.maxRestarts", spec.failure_policy.max_restarts, 0, 10_000)?;
    let policy = &spec.run_policy;
    optional("spec.runPolicy.activeDeadlineSeconds", policy.active_deadline_seconds)?;
    optional("spec.runPolicy.startupDeadlineSeconds", policy.startup_deadline_seconds)?;
    optional("spec.runPolicy.progressDeadlineSeconds", policy.progress_deadline_seconds)?;
    Ok(JobPolicy::new(spec))
}

fn has_container(template: Option<&k8s_openapi::api::core::v1::PodTemplateSpec>) -> bool {
    template.and_then(|template| template.spec.as_ref()).is_some_and(|spec| !spec.containers.is_empty())
}

fn number(field: &'static str, value: i32, low: u32, high: u32) -> Result<u32, SpecError> {
    let wrong = SpecError::Range { field, value: value.into(), low: low.into(), high: high.into() };
    u32::try_from(value).ok().filter(|value| (low..=high).contains(value)).ok_or(wrong)
}

fn optional(field: &'static str, seconds: Option<i64>) -> Result<Option<SignedDuration>, SpecError> {
    seconds.map(|seconds| duration(field, seconds)).transpose()
}

fn duration(field: &'static str, seconds: i64) -> Result<SignedDuration, SpecError> {
    const TEN_YEARS: i64 = 315_360_000;
    if (0..=TEN_YEARS).contains(&seconds) {
        Ok(SignedDuration::from_secs(seconds))
    } else {
        Err(SpecError::Range { field, value: seconds, low: 0, high: TEN_YEARS })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::fixtures::job;

    #[test]
    fn a_minimal_job_gets_the_documented_defaults() {
        let job = validate(job("").into()).expect("valid");
        assert_eq!((job.servers, job.trainers, job.policy.max_restarts), (1, 2, 3));
        assert_eq!(job.server_drain, SignedDuration::from_secs(60));
        assert_eq!(job.rank(Replica::trainer(1)), 2);
    }

    #[test]
    fn pods_that_began_without_certificates_go_on_without_them() {
        let rows = [
            ("", "", Some("mnist-tls-0b6c-0")),
            ("network: {mutualTLS: false}", "", None),
            ("", "{phase: Suspended, firstIncarnation: 2}", Some("mnist-tls-0b6c-2")),
            ("", "{phase: Running, startTime: '2026-01-01T00:00:00Z'}", None),
            ("", "{startTime: '2026-01-01T00:00:00Z', certificates: mine, firstIncarnation: 2}", Some("mine")),
        ];
        for (spec, status, want) in rows {
            let mut object = job(spec);
            object.status = (!status.is_empty()).then(|| serde_yaml::from_str(status).expect("a status"));
            assert_eq!(validate(object.into()).expect("valid").certificates().as_deref(), want, "{spec} {status}");
        }
    }

    #[test]
    fn what_an_older_definition_let_through_is_refused_with_the_field() {
        let rows = [
            ("ps: {replicas: 0}", "spec.ps.replicas is 0; write a number from 1 to 128"),
            ("ps: {template: {spec: {containers: []}}}", "spec.ps.template.spec.containers is empty"),
            ("failurePolicy: {maxRestarts: -1}", "spec.failurePolicy.maxRestarts is -1"),
            ("runPolicy: {activeDeadlineSeconds: -5}", "spec.runPolicy.activeDeadlineSeconds is -5"),
            (
                "successPolicy: {operator: Any, minSucceeded: 3}",
                "spec.successPolicy.minSucceeded is 3; write a number from 1 to 2",
            ),
            ("training: {optimizer: {nesterov: true}}", "nesterov"),
            (
                "elasticPolicy: {minReplicas: 5, maxReplicas: 4}",
                "spec.elasticPolicy.minReplicas is 5; write a number from 1 to 4",
            ),
            (
                "elasticPolicy: {minReplicas: 3, maxReplicas: 4}",
                "spec.trainer.replicas is 2; write a number from 3 to 4",
            ),
            ("elasticPolicy: {maxReplicas: 1}", "spec.trainer.replicas is 2; write a number from 1 to 1"),
        ];
        for (spec, want) in rows {
            let error = validate(job(spec).into()).expect_err(spec).to_string();
            assert!(error.contains(want), "{spec}: {error}");
        }
    }
}
