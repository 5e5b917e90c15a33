//! Creates pods.

use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, ResourceExt as _};
use serde_json::Value;

use super::create::{Creation, Outcome, send};
use super::write_priority::WritePriority;
use super::writer::Writer;
use crate::controller::build;
use crate::controller::cache::expectations::Expectations;
use crate::controller::cache::pods::CachedPod;
use crate::controller::error::ReconcileError;
use crate::controller::model::{NewPod, Refusal};
use crate::controller::validate::ValidJob;
use crate::traces;

/// Waits for the permit, builds the pod and sends it. Thousands of pods may wait for their permits; built before, they
/// would take most of the operator's memory.
pub async fn create_pod(
    writer: &Writer,
    expectations: &Expectations<CachedPod>,
    job: &ValidJob,
    new: &NewPod,
    worker_image: &str,
) -> Result<Result<Pod, Refusal>, ReconcileError> {
    let _permit = writer.permit(WritePriority::Child).await?;
    let pod = traces::step("build").in_scope(|| build::pod(job, new, worker_image));
    let request = expectations.request(&job.namespace, &pod.name_any());
    let outcome = match build::scheduling_group(job) {
        Some(group) => Box::pin(send_with_group(writer, job, &pod, group)).await?,
        None => {
            let pods = Api::<Pod>::namespaced(writer.client.clone(), &job.namespace);
            send(&pods, &Creation::new(&pod, &job.uid)).await?
        }
    };
    Ok(match outcome {
        Outcome::Created(metadata) => {
            let pod = Pod { metadata: *metadata, ..pod };
            if let Some(new) = CachedPod::read(&pod) {
                request.created(new, Instant::now());
            }
            Ok(pod)
        }
        Outcome::Exists(pod) => Ok(*pod),
        Outcome::Refused(refusal) => Err(refusal),
    })
}

/// Sends a pod with spec.schedulingGroup, a field that its type here does not have.
async fn send_with_group(
    writer: &Writer,
    job: &ValidJob,
    pod: &Pod,
    group: Value,
) -> Result<Outcome<Pod>, ReconcileError> {
    let resource = ApiResource::erase::<Pod>(&());
    let pods = Api::<DynamicObject>::namespaced_with(writer.client.clone(), &job.namespace, &resource);
    let mut object = serde_json::to_value(pod).map_err(ReconcileError::Json)?;
    object["spec"]["schedulingGroup"] = group;
    let object = serde_json::from_value(object).map_err(ReconcileError::Json)?;
    let child = format!("pod {}", pod.name_any());
    match send(&pods, &Creation { child, object: &object, owner: &job.uid, missing_kind: None }).await? {
        Outcome::Created(metadata) => Ok(Outcome::Created(metadata)),
        Outcome::Exists(object) => {
            let object = serde_json::to_value(object).map_err(ReconcileError::Json)?;
            Ok(Outcome::Exists(Box::new(serde_json::from_value(object).map_err(ReconcileError::Json)?)))
        }
        Outcome::Refused(refusal) => Ok(Outcome::Refused(refusal)),
    }
}
