//! Writes statuses, with the resource version of the job that the decision read, so that the API server refuses a status
//! that was decided on an older job. Server-side apply would force a field over another writer's newer one, and a restart
//! that was counted on an old status would be counted twice.

use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus};

use super::request;
use crate::controller::error::ReconcileError;

/// Writes `status` if it differs from the job's. Returns the job as it is stored then; `None` if nothing was written.
pub async fn update_status(
    client: &Client,
    job: &ParameterServerJob,
    status: &ParameterServerJobStatus,
) -> Result<Option<ParameterServerJob>, ReconcileError> {
    if job.status.clone().unwrap_or_default() == *status {
        return Ok(None);
    }
    let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), &job.namespace().unwrap_or_default());
    match request::replace_status(&jobs, &job.metadata, status).await {
        // The API server accepted the status because the job has not changed, so its spec has not either.
        Ok(metadata) => Ok(Some(ParameterServerJob { metadata, spec: job.spec.clone(), status: Some(status.clone()) })),
        Err(kube::Error::Api(answer)) if answer.is_conflict() => Err(ReconcileError::OutOfDate),
        Err(kube::Error::Api(answer)) if answer.is_not_found() => Ok(None),
        Err(source) => Err(ReconcileError::Api { what: "write the status".into(), source: Box::new(source) }),
    }
}
