//! Deletes pods and jobs. Each delete names the uid of its object, so repeating it is safe.

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;

use super::request::{self, ignore_gone};
use super::write_priority::WritePriority;
use super::writer::{REQUESTS_OF_JOB, Writer};
use crate::controller::error::ReconcileError;
use crate::controller::model::Deletion;

/// Deletes pods by name and uid. Not found and a conflict of uids count as success.
pub async fn delete_pods(writer: &Writer, namespace: &str, deletions: &[Deletion]) -> Result<(), ReconcileError> {
    let pods = Api::<Pod>::namespaced(writer.client.clone(), namespace);
    let mut requests = Vec::new();
    for deletion in deletions {
        requests.push(delete_pod(writer, &pods, deletion));
    }
    stream::iter(requests).buffer_unordered(REQUESTS_OF_JOB).try_collect().await
}

async fn delete_pod(writer: &Writer, pods: &Api<Pod>, deletion: &Deletion) -> Result<(), ReconcileError> {
    let _permit = writer.permit(WritePriority::Child).await?;
    let mut params = DeleteParams::default().preconditions(only(&deletion.uid));
    if deletion.force {
        params = params.grace_period(0);
    }
    ignore_gone(request::delete(pods, &deletion.name, &params).await, || format!("delete pod {}", deletion.name))
}

/// Deletes the job itself; the garbage collector deletes its children.
pub async fn delete_job(writer: &Writer, job: &ParameterServerJob) -> Result<(), ReconcileError> {
    writer.check_tenure()?;
    let jobs = Api::<ParameterServerJob>::namespaced(writer.client.clone(), &job.namespace().unwrap_or_default());
    let params = DeleteParams::background().preconditions(only(&job.uid().unwrap_or_default()));
    ignore_gone(request::delete(&jobs, &job.name_any(), &params).await, || "delete the job after its ttl".into())
}

/// Lets a delete apply only to the object with this uid.
fn only(uid: &str) -> Preconditions {
    Preconditions { uid: Some(uid.to_owned()), resource_version: None }
}
