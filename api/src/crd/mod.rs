//! The custom resource `ParameterServerJob`: its spec, its status, the names of what it owns, and
//! the CustomResourceDefinition that `crdgen` writes. Field texts here are what
//! `kubectl explain psjob.spec` shows; rules here are what the API server and `psjobs validate`
//! both enforce.

mod checkpoint;
mod elastic;
mod failure;
pub mod names;
mod network;
mod placement;
mod policy;
mod reference;
mod schema;
mod status;
pub mod store_pod;
mod tracking;

use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

pub use checkpoint::{AccessMode, CheckpointSpec, ObjectStore, VolumeClaim};
pub use elastic::ElasticPolicy;
pub use failure::{Backoff, FailureAction, FailurePolicy, FailureRule, RestartStrategy, TargetRole};
pub use network::NetworkSpec;
pub use placement::Placement;
pub use policy::{
    CleanPodPolicy, RestartPolicy, RunPolicy, SchedulingBackend, SchedulingPolicy, StartupPolicy, SuccessOperator,
    SuccessPolicy,
};
pub use reference::reference;
pub use schema::definition;
pub use status::{
    Checkpoint, ConditionType, JobCondition, LastFailure, Model, ModelMetric, ParameterServerJobStatus, Phase,
    Progress, ReplicaGroup, RoleStatus,
};
pub use tracking::{MlflowSpec, TrackingSpec};

use self::placement::{IS_SEPARATE, is_one_container};
use crate::env::MOST_CONNECTIONS;
use crate::role::Role;
use crate::training::Training;

/// API group of the resource.
pub const GROUP: &str = "psjobs.dev";
/// Version of the resource.
pub const VERSION: &str = "v1alpha1";
/// Value of spec.managedBy that means this operator, as its absence does.
pub const MANAGER: &str = "psjobs.dev/operator";
/// Kind of the resource.
pub const KIND: &str = "ParameterServerJob";
// The API server asks the rules at every write of a status, too. To read a field costs it a copy of the schema around
// that field, so a rule reads few, and what is large is not compared while a status is written.
// `make bench-operator ARGS=dry-run-create-ms` measures it.

/// In a rule at the root: the status is being written, with which the spec cannot change; a change of the spec comes
/// with the status that is stored. A status without a phase is an error here, which `||` forgives if the rest holds.
/// <https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#status-subresource>
const IS_STATUS: &str = "(has(oldSelf.status) ? self.status.phase != oldSelf.status.phase : has(self.status)) || \
     has(self.status) && has(self.status.progress) && \
     (!has(oldSelf.status.progress) || self.status.progress.step != oldSelf.status.progress.step)";
/// In a rule at the root: what pods are made from is as it was, but for the number of an elastic job's trainers.
const IS_SAME_START: &str = "self.spec.training == oldSelf.spec.training && self.spec.ps == oldSelf.spec.ps && \
     (self.spec.trainer == oldSelf.spec.trainer || has(self.spec.elasticPolicy) && \
     self.spec.trainer.template == oldSelf.spec.trainer.template && \
     self.spec.trainer.restartPolicy == oldSelf.spec.trainer.restartPolicy && \
     self.spec.trainer.gpus == oldSelf.spec.trainer.gpus && \
     self.spec.trainer.gpuResourceName == oldSelf.spec.trainer.gpuResourceName)";
/// In a rule of the spec: it was suspended before this change.
const WAS_SUSPENDED: &str = "has(oldSelf.suspend) && oldSelf.suspend";

/// In a rule of the spec: this optional field is as it was.
fn is_same(field: &str) -> String {
    format!("(has(self.{field}) ? has(oldSelf.{field}) && self.{field} == oldSelf.{field} : !has(oldSelf.{field}))")
}

/// A training job: parameter servers, and trainers that push gradients to them and pull
/// parameters back. `spec.trainer.template` is the one field that must be written.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "psjobs.dev",
    version = "v1alpha1",
    kind = "ParameterServerJob",
    plural = "parameterserverjobs",
    shortname = "psjob",
    shortname = "psjobs",
    category = "all",
    namespaced,
    cel,
    derive = "PartialEq",
    status = "ParameterServerJobStatus",
    scale(
        spec_replicas_path = ".spec.trainer.replicas",
        status_replicas_path = ".status.trainer.active",
        label_selector_path = ".status.trainer.selector"
    ),
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Servers","type":"string","jsonPath":".status.ps.summary"}"#,
    printcolumn = r#"{"name":"Trainers","type":"string","jsonPath":".status.trainer.summary"}"#,
    printcolumn = r#"{"name":"Progress","type":"string","jsonPath":".status.progress.summary"}"#,
    printcolumn = r#"{"name":"Restarts","type":"integer","jsonPath":".status.restarts"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Step","type":"integer","jsonPath":".status.progress.step","priority":1}"#,
    printcolumn = r#"{"name":"Loss","type":"number","jsonPath":".status.progress.metrics[?(@.name==\"loss\")].value","priority":1}"#,
    printcolumn = r#"{"name":"Examples/s","type":"number","jsonPath":".status.progress.examplesPerSecond","priority":1}"#,
    printcolumn = r#"{"name":"Queue","type":"string","jsonPath":".spec.schedulingPolicy.queue","priority":1}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.reason","priority":1}"#,
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must start with a letter and hold only a-z, 0-9 and '-', because services are named after it; for example mnist-1"),
    validation = Rule::new("size(self.metadata.name) <= 50")
        .message("metadata.name must be at most 50 characters long, so that pod names such as NAME-trainer-4095 fit 63; shorten it"),
    validation = Rule::new(format!("{IS_STATUS} || {IS_SAME_START} || has(oldSelf.spec.suspend) && oldSelf.spec.suspend"))
        .message("spec.training, spec.ps and spec.trainer cannot change while the job runs, but for trainer.replicas of a job with elasticPolicy; set spec.suspend to true first, or create a new job"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(format!("{} || {WAS_SUSPENDED}", is_same("elasticPolicy")))
        .message("spec.elasticPolicy cannot change while the job runs, because its processes know it from their start; set spec.suspend to true first, or create a new job"),
    validation = Rule::new("!has(self.elasticPolicy) || (self.elasticPolicy.minReplicas <= self.trainer.replicas && self.trainer.replicas <= self.elasticPolicy.maxReplicas)")
        .message("spec.trainer.replicas must lie between spec.elasticPolicy.minReplicas and maxReplicas; write a number between them"),
    validation = Rule::new("!has(self.elasticPolicy) || self.training.consistency.backupTrainers == 0")
        .message("spec.elasticPolicy does not go with spec.training.consistency.backupTrainers, whose number is of a fixed count of trainers; remove one of the two"),
    validation = Rule::new("!has(self.elasticPolicy) || !has(self.training.consistency.exactRecovery) || !self.training.consistency.exactRecovery")
        .message("spec.elasticPolicy does not go with spec.training.consistency.exactRecovery: its steps have no one result; remove one of the two"),
    validation = Rule::new("!has(self.elasticPolicy) || !self.training.batch.adaptive")
        .message("spec.elasticPolicy does not go with spec.training.batch.adaptive: its work is dealt out in batches of one size, of which a fast trainer takes more; remove one of the two"),
    validation = Rule::new("!has(self.elasticPolicy) || !has(self.schedulingPolicy) || !has(self.schedulingPolicy.minAvailable) || self.schedulingPolicy.minAvailable <= self.ps.replicas + self.elasticPolicy.minReplicas")
        .message("spec.schedulingPolicy.minAvailable is above the servers and spec.elasticPolicy.minReplicas, so a job scaled down could not start again; write a smaller one, or remove it"),
    validation = Rule::new("!has(self.elasticPolicy) || !has(self.schedulingPolicy) || !has(self.schedulingPolicy.queue) || (has(self.schedulingPolicy.backend) && self.schedulingPolicy.backend == 'Volcano')")
        .message("spec.schedulingPolicy.queue: Kueue admits groups of a fixed size, and an elastic job has none; remove queue or spec.elasticPolicy, or use a queue of Volcano"),
    validation = Rule::new(format!("{} || {WAS_SUSPENDED}", is_same("schedulingPolicy")))
        .message("spec.schedulingPolicy cannot change while the job runs; set spec.suspend to true first, or create a new job"),
    validation = Rule::new(format!("{} || {WAS_SUSPENDED}", is_same("checkpoint")))
        .message("spec.checkpoint cannot change while the job runs; set spec.suspend to true first, or create a new job"),
    validation = Rule::new(format!("{} || {WAS_SUSPENDED}", is_same("tracking")))
        .message("spec.tracking cannot change while the job runs, because its servers know it from their start; set spec.suspend to true first, or create a new job"),
    validation = Rule::new("self.training.consistency.backupTrainers == 0 || self.training.consistency.backupTrainers < self.trainer.replicas")
        .message("spec.training.consistency.backupTrainers must be less than spec.trainer.replicas, so that somebody trains; write a smaller one"),
    validation = Rule::new(is_same("managedBy"))
        .message("spec.managedBy cannot change; create a new job"),
    validation = Rule::new("!has(self.schedulingPolicy) || !has(self.schedulingPolicy.minAvailable) || self.schedulingPolicy.minAvailable <= (self.ps.placement == 'Colocated' ? 0 : self.ps.replicas) + self.trainer.replicas")
        .message("spec.schedulingPolicy.minAvailable is above the number of servers and trainers, so they could never start; write a smaller one"),
    validation = Rule::new("!has(self.successPolicy.minSucceeded) || self.successPolicy.minSucceeded <= self.trainer.replicas")
        .message("spec.successPolicy.minSucceeded is above spec.trainer.replicas, so the job could never succeed; write a smaller one"),
    validation = Rule::new(format!("{IS_SEPARATE} || (self.ps.replicas == 1 || self.ps.replicas == self.trainer.replicas) && self.trainer.replicas <= 128 && self.ps.replicationFactor <= self.trainer.replicas"))
        .message("spec.ps.placement Colocated puts a server beside each trainer: leave spec.ps.replicas out, or write as many as spec.trainer.replicas, which is then at most 128 and at least spec.ps.replicationFactor"),
    validation = Rule::new(format!("!has(self.elasticPolicy) || {IS_SEPARATE}"))
        .message("spec.ps.placement Colocated does not go with spec.elasticPolicy: the number of servers cannot change, and a trainer that leaves would take its server along; remove one of the two"),
    validation = Rule::new(format!("self.successPolicy.operator == 'All' || {IS_SEPARATE}"))
        .message("spec.ps.placement Colocated needs all trainers to the end, because their pods have the servers; remove spec.successPolicy.operator, or spec.ps.placement"),
)]
pub struct ParameterServerJobSpec {
    /// Stop all pods of the job and keep the job itself; false starts it again, from its last
    /// checkpoint if it has any (spec.checkpoint), else from the beginning. Default false.
    #[serde(default)]
    pub suspend: bool,
    /// Who takes care of the job. Default: this operator; it leaves a job alone that names anything
    /// but psjobs.dev/operator here, for example kueue.x-k8s.io/multikueue. It cannot change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub managed_by: Option<String>,
    /// How the job trains: consistency, optimizer, batch size and seed.
    #[serde(default)]
    #[x_kube(
        validation = Rule::new("self.consistency.mode != 'Sync' || !has(self.staleness.policy) || self.staleness.policy == 'None'")
            .message("spec.training.staleness.policy: nothing is stale in Sync; remove it, or set consistency.mode to Bounded or Async"),
        validation = Rule::new("!has(self.staleness.momentum) || self.consistency.mode != 'Sync'")
            .message("spec.training.staleness.momentum: in Sync there is one momentum, of the mean of the trainers' gradients; remove it, or set consistency.mode to Bounded or Async"),
        validation = Rule::new("!has(self.staleness.momentum) || (self.optimizer.type == 'SGD' && !has(self.local))")
            .message("spec.training.staleness.momentum: only SGD without spec.training.local can have its momentum at the trainers; remove it"),
        validation = Rule::new("!self.batch.adaptive || self.consistency.backupTrainers == 0")
            .message("spec.training.batch.adaptive gives a slow trainer fewer examples, backupTrainers leave its gradients out; remove one of the two"),
        validation = Rule::new("!has(self.local) || !has(self.consistency.overlap) || !self.consistency.overlap")
            .message("spec.training.consistency.overlap is for trainers that exchange in every step, with local they make steps alone; remove it, or write local.overlap instead"),
        validation = Rule::new("!self.batch.adaptive || !has(self.local)")
            .message("spec.training.batch.adaptive deals out the examples of each step, with local trainers make their steps alone; remove one of the two"),
    )]
    pub training: Training,
    /// The parameter servers.
    #[serde(default)]
    #[x_kube(
        validation = Rule::new("self.replicationFactor <= self.replicas || self.placement == 'Colocated'")
            .message("spec.ps.replicationFactor 2 needs two servers; set spec.ps.replicas to 2 or more, or remove it"),
        validation = Rule::new(format!("self.placement != 'Colocated' || {}", is_one_container()))
            .message("spec.ps.template: with placement Colocated it may have one container and spec.terminationGracePeriodSeconds only, because the pod is the trainer's; write the rest to spec.trainer.template"),
    )]
    pub ps: ServerSpec,
    /// The trainers.
    pub trainer: TrainerSpec,
    /// How many trainers the job may have while it trains. Default: as many as trainer.replicas says, from
    /// beginning to end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.minReplicas <= self.maxReplicas")
        .message("spec.elasticPolicy.minReplicas is above maxReplicas; write a smaller one, or raise maxReplicas"))]
    pub elastic_policy: Option<ElasticPolicy>,
    /// When the trainers' pods are created: ServersReady (default), when all servers are ready, or
    /// AnyOrder, together with the servers'. Pods that are scheduled together, by
    /// schedulingPolicy.backend or queue, are created together.
    #[serde(default)]
    pub startup_policy: StartupPolicy,
    /// When the job has succeeded.
    #[serde(default)]
    #[x_kube(validation = Rule::new("!has(self.minSucceeded) || self.operator == 'Any'")
        .message("spec.successPolicy.minSucceeded is for the operator Any; remove it, or set operator to Any"))]
    pub success_policy: SuccessPolicy,
    /// What happens when pods fail.
    #[serde(default)]
    pub failure_policy: FailurePolicy,
    /// Where the servers keep the job's state. Default: nowhere; a lost server is then filled from a
    /// trainer's parameters, without optimizer state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("[has(self.volumeClaim), has(self.existingClaim), has(self.objectStore)].filter(given, given).size() == 1")
        .message("spec.checkpoint needs one of volumeClaim, for example {size: 1Gi}, existingClaim, the name of one, and objectStore, for example {url: 's3://bucket/folder'}"))]
    #[x_kube(validation = Rule::new("!has(self.objectStore) || !(self.objectStore.url + (has(self.path) ? '/' + self.path : '') + '/').matches('[?#@[:cntrl:]]|/[.]{1,2}/|[^:/]//')")
        .message("spec.checkpoint.objectStore.url and path are folders of a bucket: remove empty parts, . and .., and the letters ?, # and @"))]
    pub checkpoint: Option<CheckpointSpec>,
    /// Tracking servers that get the job's metrics, parameters and model. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("!has(self.mlflow) || self.mlflow.uri.matches('^https?://[^/?#@[:space:]]+(/[^?#@[:space:]]*)?$')")
        .message("spec.tracking.mlflow.uri must be an address with http:// or https:// and without the letters ?, # and @, for example http://mlflow.mlflow:5000; credentials belong to secret"))]
    pub tracking: Option<TrackingSpec>,
    /// Deadlines and cleaning up.
    #[serde(default)]
    pub run_policy: RunPolicy,
    /// How the job's pods are scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("!has(self.minAvailable) || (has(self.backend) && self.backend != 'None')")
            .message("spec.schedulingPolicy.minAvailable needs somebody who schedules pods together; set backend to Workload, Volcano or Coscheduling, or remove it"),
        validation = Rule::new("!has(self.queue) || !has(self.backend) || self.backend != 'None'")
            .message("spec.schedulingPolicy.queue: the backend None has no queues; remove one of the two (without a backend it is a queue of Kueue)"),
    )]
    pub scheduling_policy: Option<SchedulingPolicy>,
    /// How the job's pods talk, and who may reach them. It cannot change.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.network cannot change; create a new job"))]
    pub network: NetworkSpec,
}

impl ParameterServerJobSpec {
    /// Returns whether each trainer has a server in its pod.
    #[must_use]
    pub fn is_colocated(&self) -> bool {
        self.ps.placement == Placement::Colocated
    }

    /// Returns the role by which the pods of `role` are named, and have their label.
    #[must_use]
    pub fn pod_role(&self, role: Role) -> Role {
        if self.is_colocated() { Role::Trainer } else { role }
    }

    /// Returns the template of the pods that have servers, if the job has one.
    #[must_use]
    pub fn server_pod(&self) -> Option<&PodTemplateSpec> {
        if self.is_colocated() { Some(&self.trainer.template) } else { self.ps.template.as_ref() }
    }

    /// Returns the number of servers.
    #[must_use]
    pub fn servers(&self) -> i32 {
        if self.is_colocated() { self.trainer.replicas } else { self.ps.replicas }
    }
}

/// The parameter servers: they hold the parameters and run the optimizer.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerSpec {
    /// Number of servers, 1 to 128; the parameters are spread evenly over them. Default 1; with placement Colocated as many
    /// as trainers.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 128))]
    pub replicas: i32,
    /// Where the servers run. Separate (default): each in a pod of its own. Colocated: one in the pod of each trainer, with which
    /// it shares memory; it is lost and started again with that pod. Not with elasticPolicy.
    #[serde(default)]
    pub placement: Placement,
    /// Servers that hold each parameter, 1 or 2. With 2 an update is acknowledged when the second
    /// server has it, and the loss of a server costs neither a step nor a restart; it doubles the
    /// servers' memory. Needs replicas of at least 2. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 2))]
    pub replication_factor: i32,
    /// Connections that each trainer opens to each server, 1 to 16; the parameters are dealt over them. More than one
    /// is faster where one core for a connection is the limit, as with TLS or on fast networks. Default: 1, with TLS half
    /// of the trainer's cores, at most 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MOST_CONNECTIONS))]
    pub connections: Option<i32>,
    /// When a server that failed is started again, as for trainers. Default OnFailure.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// Pod template of the servers. Default: the operator's worker image with the argument
    /// `serve`. The first container is the server; it gets the job's environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("has(self.spec) && size(self.spec.containers) >= 1")
        .message("spec.ps.template.spec.containers needs a container; remove the template to use the default one"))]
    pub template: Option<PodTemplateSpec>,
}

/// The trainers: they read the data, compute gradients and exchange them with the servers.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrainerSpec {
    /// Number of trainers, 1 to 4096. It changes while the job runs only with elasticPolicy. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 4096))]
    pub replicas: i32,
    /// GPUs for each trainer; set as a limit of the first container. Default 0: train on CPU.
    #[serde(default)]
    #[schemars(range(min = 0, max = 64))]
    pub gpus: i32,
    /// Name of the GPU resource, for MIG slices or other vendors. Default nvidia.com/gpu.
    #[serde(default = "default_gpu_resource")]
    #[schemars(length(min = 1, max = 253))]
    pub gpu_resource_name: String,
    /// When a trainer that ended is started again. OnFailure (default): if it failed. Never: not
    /// at all, the first failure fails the job. ExitCode: if it was killed by a signal
    /// (exit code 128 and above); codes 1 to 127 fail the job.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// Pod template of the trainers. The first container is the trainer; its args say what to
    /// train, for example [train, mnist, --epochs, "3"].
    #[x_kube(validation = Rule::new("has(self.spec) && size(self.spec.containers) >= 1")
        .message("spec.trainer.template.spec.containers needs a container; write for example [{name: trainer, image: psjobs-worker:0.1.0, args: [train, mnist]}]"))]
    pub template: PodTemplateSpec,
}

impl ParameterServerJobSpec {
    /// GPUs that a replica of this role is given: a trainer those of `trainer.gpus`, a server those of its template's limits.
    #[must_use]
    pub fn gpus(&self, role: Role) -> u32 {
        if role == Role::Trainer {
            return self.trainer.gpus.unsigned_abs();
        }
        let pod = self.ps.template.as_ref().and_then(|template| template.spec.as_ref());
        let resources = pod.and_then(|pod| pod.containers.first()).and_then(|main| main.resources.as_ref());
        let limits = resources.and_then(|resources| resources.limits.as_ref());
        limits
            .and_then(|limits| limits.get(&self.trainer.gpu_resource_name))
            .map_or(0, |gpus| gpus.0.parse().unwrap_or(0))
    }
}

impl Default for TrainerSpec {
    fn default() -> Self {
        Self {
            replicas: one(),
            gpus: 0,
            gpu_resource_name: default_gpu_resource(),
            restart_policy: RestartPolicy::default(),
            template: PodTemplateSpec::default(),
        }
    }
}

impl Default for ServerSpec {
    fn default() -> Self {
        Self {
            replicas: one(),
            placement: Placement::default(),
            replication_factor: one(),
            connections: None,
            restart_policy: RestartPolicy::default(),
            template: None,
        }
    }
}

fn one() -> i32 {
    1
}

fn default_gpu_resource() -> String {
    "nvidia.com/gpu".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_of_the_trainers_field_and_of_the_servers_limits() {
        let limits = |limits: &str| {
            format!(
                r#"{{"template": {{"spec": {{"containers": [{{"name": "s", "resources": {{"limits": {limits}}}}}]}}}}}}"#
            )
        };
        let rows = [
            ("{}".to_owned(), "nvidia.com/gpu", (3, 0)),
            (limits(r#"{"nvidia.com/gpu": "2", "memory": "1Gi"}"#), "nvidia.com/gpu", (3, 2)),
            (limits(r#"{"nvidia.com/gpu": "2"}"#), "amd.com/gpu", (3, 0)),
            (limits(r#"{"nvidia.com/mig-1g.5gb": "1"}"#), "nvidia.com/mig-1g.5gb", (3, 1)),
            (limits(r#"{"nvidia.com/gpu": "none"}"#), "nvidia.com/gpu", (3, 0)),
        ];
        for (ps, resource, want) in rows {
            let trainer = format!(r#"{{"gpus": 3, "gpuResourceName": "{resource}", "template": {{}}}}"#);
            let spec: ParameterServerJobSpec =
                serde_json::from_str(&format!(r#"{{"ps": {ps}, "trainer": {trainer}}}"#)).expect("a spec");
            assert_eq!((spec.gpus(Role::Trainer), spec.gpus(Role::Server)), want, "{ps} {resource}");
        }
    }
}
