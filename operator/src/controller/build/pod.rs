//! Builds the pod of a replica.

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvVar, HTTPGetAction, Pod, PodSpec, PodTemplateSpec, Probe, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use psjobs_api::crd::{MlflowSpec, ParameterServerJobSpec, names};
use psjobs_api::{DEFAULT_PORT, Environment, METRICS_PORT, Role};
use psjobs_policy::deadlines::LAST_CHECKPOINT_SECONDS;

use super::metadata::{job_labels, metadata};
use super::{certificates, checkpoint, colocated, credentials, defaults, gang, placement, scheduling};
use crate::controller::model::NewPod;
use crate::controller::observe::Replica;
use crate::controller::validate::ValidJob;

/// Default path of a container's termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Builds the pod of a replica: the user's template, the job's environment in its first container, and defaults for
/// fields that the template does not set. The pod of a trainer may have a server, too.
pub fn pod(job: &ValidJob, new: &NewPod, worker_image: &str) -> Pod {
    let NewPod { replica, incarnation, failures, failures_in_a_row, failed_incarnation, .. } = *new;
    let spec = &job.object.spec;
    let (of_template, mut pod_spec) = replica_spec(job, new, worker_image);
    let name = new.name(&job.name);

    if let Some(server) = &new.server {
        let of_server = NewPod { replica: Replica::server(replica.index), server: None, ..new.clone() };
        let (_, server_spec) = replica_spec(job, &of_server, worker_image);
        colocated::add(server_spec, server.is_alone, &mut pod_spec);
    }
    pod_spec.hostname = Some(name.clone());
    pod_spec.subdomain = Some(names::service(&job.name));
    // The operator replaces pods itself, so that restarts and their causes are in the job's status.
    pod_spec.restart_policy = Some("Never".into());
    if replica.role == Role::Server || new.server.is_some() {
        placement::place(job, &mut pod_spec);
    }
    defaults::apply(&mut pod_spec);

    let mut labels = of_template.labels.unwrap_or_default();
    let mut annotations = of_template.annotations.unwrap_or_default();
    if let Some(policy) = &spec.scheduling_policy {
        scheduling::apply(job, policy, &mut pod_spec, &mut labels, &mut annotations);
        gang::join(job, &mut pod_spec, &mut labels, &mut annotations);
    }
    labels.extend(job_labels(job));
    labels.insert(names::LABEL_ROLE.into(), replica.role.to_string());
    labels.insert(names::LABEL_INDEX.into(), replica.index.to_string());
    labels.insert("app.kubernetes.io/component".into(), replica.role.to_string());
    // Replaces a label of the template, because the operator finds its pods by this label.
    labels.remove(names::LABEL_SHARD);
    if let Some(shard) = job.object.labels().get(names::LABEL_SHARD) {
        labels.insert(names::LABEL_SHARD.into(), shard.clone());
    }
    annotations.insert(names::ANNOTATION_INCARNATION.into(), incarnation.to_string());
    annotations.insert(names::ANNOTATION_FAILURES.into(), failures.to_string());
    annotations.insert(names::ANNOTATION_FAILURES_IN_A_ROW.into(), failures_in_a_row.to_string());
    // Replaces an annotation of the template.
    annotations.remove(names::ANNOTATION_FAILED_INCARNATION);
    if let Some(failed) = failed_incarnation {
        annotations.insert(names::ANNOTATION_FAILED_INCARNATION.into(), failed.to_string());
    }
    colocated::mark(new.server.as_ref(), &mut labels, &mut annotations);
    Pod {
        metadata: ObjectMeta { labels: Some(labels), annotations: Some(annotations), ..metadata(job, name) },
        spec: Some(pod_spec),
        status: None,
    }
}

/// Builds what a pod has for one replica: metadata and spec of its template, and in its first container what the replica needs.
fn replica_spec(job: &ValidJob, new: &NewPod, worker_image: &str) -> (ObjectMeta, PodSpec) {
    let (spec, role) = (&job.object.spec, new.replica.role);
    let template = match (role, &spec.ps.template) {
        (Role::Trainer, _) => spec.trainer.template.clone(),
        (Role::Server, Some(template)) => template.clone(),
        (Role::Server, None) => default_server(worker_image),
    };
    let mut pod_spec = template.spec.unwrap_or_default();
    if let Some(main) = pod_spec.containers.first_mut() {
        inject(main, job, new);
    }
    if let Some(checkpoint) = spec.checkpoint.as_ref().filter(|_| role == Role::Server) {
        checkpoint::mount(job, checkpoint, &mut pod_spec);
        pod_spec.termination_grace_period_seconds.get_or_insert(LAST_CHECKPOINT_SECONDS.into());
    }
    let tracking_secret = mlflow(spec, role).and_then(|mlflow| mlflow.secret.as_deref());
    if let (Some(secret), Some(main)) = (tracking_secret, pod_spec.containers.first_mut()) {
        credentials::give(main, secret);
    }
    if let Some(secret) = job.certificates() {
        certificates::mount(secret, role, &mut pod_spec);
    }
    if role == Role::Trainer && spec.trainer.gpus > 0 {
        defaults::share_memory(&mut pod_spec);
    }
    (template.metadata.unwrap_or_default(), pod_spec)
}

/// Adds environment, GPUs and termination message to the first container, whose end decides about the pod.
fn inject(main: &mut Container, job: &ValidJob, new: &NewPod) {
    let NewPod { replica, incarnation, ref finished_trainers, closing, .. } = *new;
    let server = |index| format!("{}:{DEFAULT_PORT}", job.server_host(index));
    let result_file = main.termination_message_path.clone().unwrap_or_else(|| TERMINATION_LOG.into());
    let spec = &job.object.spec;
    let servers = (0..job.servers).map(server).collect();
    let plain = Environment::new(&job.name, &job.uid, servers, job.places(Role::Trainer), spec.training.clone());
    let environment = Environment {
        namespace: job.namespace.clone(),
        role: replica.role,
        index: replica.index,
        replication_factor: spec.ps.replication_factor.unsigned_abs(),
        connections: spec.ps.connections.map(i32::unsigned_abs),
        min_trainers: job.policy.elastic.map(|elastic| elastic.awaited(closing)),
        finished_trainers: finished_trainers.clone(),
        incarnation,
        supervised: true,
        gpus: spec.gpus(replica.role),
        result_file: Some(result_file),
        checkpoint: (spec.checkpoint.as_ref().filter(|_| replica.role == Role::Server))
            .map(|spec| checkpoint::environment(job, spec)),
        mlflow: mlflow(spec, replica.role).map(MlflowSpec::server),
        tls_folder: job.certificates().map(|_| certificates::FOLDER.to_owned()),
        ..plain
    };
    let ours = environment.to_vars();
    let var = |(name, value): &(&str, String)| EnvVar {
        name: (*name).to_owned(),
        value: Some(value.clone()),
        value_from: None,
    };
    // The job's variables come first, so that the user's may refer to them as $(RANK), and replace variables of the same
    // name.
    let mut env = ours.iter().map(var).collect::<Vec<_>>();
    let theirs = main.env.take().unwrap_or_default();
    env.extend(theirs.into_iter().filter(|theirs| ours.iter().all(|(name, _)| *name != theirs.name)));
    main.env = Some(env);

    if main.termination_message_policy.is_none() {
        main.termination_message_policy = Some("FallbackToLogsOnError".into());
    }
    let trainer = &spec.trainer;
    if replica.role == Role::Trainer && trainer.gpus > 0 {
        let limits = main.resources.get_or_insert_default().limits.get_or_insert_default();
        limits.insert(trainer.gpu_resource_name.clone(), Quantity(trainer.gpus.to_string()));
    }
}

/// Returns the tracking server that pods of a role know of: only servers talk to it.
fn mlflow(spec: &ParameterServerJobSpec, role: Role) -> Option<&MlflowSpec> {
    spec.tracking.as_ref().filter(|_| role == Role::Server)?.mlflow.as_ref()
}

/// Returns the servers' template for jobs without one.
fn default_server(image: &str) -> PodTemplateSpec {
    let port = |name: &str, port: u16| ContainerPort {
        name: Some(name.into()),
        container_port: port.into(),
        ..ContainerPort::default()
    };
    let requests = [("cpu", "100m"), ("memory", "128Mi")];
    let requests = requests.map(|(name, quantity)| (name.to_owned(), Quantity(quantity.to_owned())));
    let container = Container {
        name: "server".into(),
        image: Some(image.into()),
        args: Some(vec!["serve".into()]),
        ports: Some(vec![port("grpc", DEFAULT_PORT), port("metrics", METRICS_PORT)]),
        readiness_probe: Some(Probe {
            // The gRPC health service would need a certificate, which a kubelet does not have.
            http_get: Some(HTTPGetAction {
                path: Some("/readyz".into()),
                port: IntOrString::Int(METRICS_PORT.into()),
                ..HTTPGetAction::default()
            }),
            period_seconds: Some(1),
            timeout_seconds: Some(2),
            failure_threshold: Some(10),
            ..Probe::default()
        }),
        resources: Some(ResourceRequirements { requests: Some(requests.into()), ..ResourceRequirements::default() }),
        ..Container::default()
    };
    PodTemplateSpec { metadata: None, spec: Some(PodSpec { containers: vec![container], ..PodSpec::default() }) }
}
