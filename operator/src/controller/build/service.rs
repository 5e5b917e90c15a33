//! Builds the headless service of a job.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use psjobs_api::crd::names;
use psjobs_api::{DEFAULT_PORT, METRICS_PORT};

use super::metadata::metadata;
use crate::controller::validate::ValidJob;

/// Builds the headless service, which gives every pod its host name as soon as it has an address: servers and trainers
/// look for each other before they are ready.
pub fn service(job: &ValidJob) -> Service {
    let port = |name: &str, port: u16, protocol: &str| ServicePort {
        name: Some(name.into()),
        port: port.into(),
        target_port: Some(IntOrString::Int(port.into())),
        app_protocol: Some(protocol.into()),
        ..ServicePort::default()
    };
    let grpc = if job.certificates().is_some() { "https" } else { "kubernetes.io/h2c" };
    Service {
        metadata: metadata(job, names::service(&job.name)),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            publish_not_ready_addresses: Some(true),
            selector: Some([(names::LABEL_JOB.to_owned(), job.name.clone())].into()),
            ports: Some(vec![port("grpc", DEFAULT_PORT, grpc), port("metrics", METRICS_PORT, "http")]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}
