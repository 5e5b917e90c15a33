//! Creates the Secret with a job's certificates, and deletes those of its earlier pods. The operator may not read Secrets,
//! so it cannot see whose one is that exists. It takes one for the job's only if it has made it itself, or if pods of the
//! job have it; any other one could hold the certificates of somebody who wants to listen.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams};
use kube::core::PartialObjectMeta;
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::names;

use super::create::is_overload;
use super::request::{self, ignore_gone};
use super::write_priority::WritePriority;
use super::writer::Writer;
use crate::controller::build;
use crate::controller::cache::job_state::JobStates;
use crate::controller::error::ReconcileError;
use crate::controller::model::{ObservedState, Refusal};
use crate::controller::observe::ObservedPod;
use crate::controller::validate::ValidJob;

/// Creates the certificates of the pods that start now, and deletes those of earlier pods. If the name is taken by
/// somebody else, the refusal says so, and the observed state names another one.
pub async fn create_certificates(
    writer: &Writer,
    states: &JobStates,
    job: &ValidJob,
    observed: &mut ObservedState,
) -> Result<Option<Refusal>, ReconcileError> {
    let Some(secret) = build::secret(job, Timestamp::now())? else { return Ok(None) };
    let (name, child) = (secret.name_any(), format!("secret {}", secret.name_any()));
    let secrets = Api::<Secret>::namespaced(writer.client.clone(), &job.namespace);
    let created = {
        let _permit = writer.permit(WritePriority::Child).await?;
        request::create(&secrets, &secret).await
    };
    match created {
        Ok(_) => {
            states.certificates_created(&job.uid, &name);
            if name != names::certificates(&job.name, &job.uid, 0) {
                delete_earlier(writer, job, &name).await?;
            }
            Ok(None)
        }
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let mounts_it = |pod: &ObservedPod| pod.incarnation >= job.first_incarnation();
            if states.has_created_certificates(&job.uid, &name) || observed.pods.values().any(mounts_it) {
                return Ok(None);
            }
            let next = names::other_certificates(&job.name, &job.uid, job.first_incarnation(), random());
            let message = format!(
                "it exists, and this operator does not know that it made it for this job; {next} is tried next, delete \
                 {name} if it is not needed"
            );
            observed.next_certificates = Some(next);
            Ok(Some(Refusal { child, message }))
        }
        Err(kube::Error::Api(status)) if !is_overload(&status) => {
            Ok(Some(Refusal { child, message: status.message.clone() }))
        }
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// Returns a number that no client can predict: the standard library's hashes have random keys.
fn random() -> u32 {
    (RandomState::new().hash_one(Timestamp::now().as_nanosecond()) >> 32) as u32
}

/// Deletes the job's other Secrets with certificates: pods that have one mounted keep the files.
async fn delete_earlier(writer: &Writer, job: &ValidJob, name: &str) -> Result<(), ReconcileError> {
    let secrets = Api::<PartialObjectMeta<Secret>>::namespaced(writer.client.clone(), &job.namespace);
    let ours = format!("{}={},app.kubernetes.io/managed-by={}", names::LABEL_JOB, job.name, names::MANAGED_BY);
    let others = format!("metadata.name!={name},type={}", build::SECRET_TYPE);
    let others = ListParams::default().labels(&ours).fields(&others);
    let _permit = writer.permit(WritePriority::Child).await?;
    let deleted = secrets.delete_collection(&DeleteParams::default(), &others).await.map(drop);
    ignore_gone(deleted, || "delete the certificates of earlier pods".into())
}
