//! Creates the objects that a job's pods need before they exist: certificates, a volume, a network policy, and the group
//! that they are scheduled in.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, ListParams};
use kube::core::DynamicObject;
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::names;

use super::create::{Creation, Outcome, create, is_overload};
use super::request::{self, ignore_gone};
use super::write_priority::WritePriority;
use super::writer::Writer;
use crate::controller::build::{self, Group};
use crate::controller::error::ReconcileError;
use crate::controller::model::Refusal;
use crate::controller::validate::ValidJob;

/// Creates the objects in order. Returns the first refusal, if there is one.
pub async fn create_prerequisites(writer: &Writer, job: &ValidJob) -> Result<Option<Refusal>, ReconcileError> {
    if let Some(refusal) = create_certificates(writer, job).await? {
        return Ok(Some(refusal));
    }
    if let Some(claim) = build::claim(job) {
        let claims = Api::<PersistentVolumeClaim>::namespaced(writer.client.clone(), &job.namespace);
        if let Outcome::Refused(refusal) = create(writer, &claims, &Creation::new(&claim, &job.uid)).await? {
            return Ok(Some(refusal));
        }
    }
    if let Some(policy) = build::policy(job) {
        let policies = Api::<NetworkPolicy>::namespaced(writer.client.clone(), &job.namespace);
        if let Outcome::Refused(refusal) = create(writer, &policies, &Creation::new(&policy, &job.uid)).await? {
            return Ok(Some(refusal));
        }
    }
    for group in build::groups(job) {
        if let Outcome::Refused(refusal) = create_group(writer, job, &group).await? {
            return Ok(Some(refusal));
        }
    }
    Ok(None)
}

/// Creates the certificates of the pods that start now. The operator may create Secrets and not read them: one that
/// exists is the job's, because its name has the job's uid.
async fn create_certificates(writer: &Writer, job: &ValidJob) -> Result<Option<Refusal>, ReconcileError> {
    let Some(secret) = build::secret(job, Timestamp::now())? else { return Ok(None) };
    let secrets = Api::<Secret>::namespaced(writer.client.clone(), &job.namespace);
    let child = format!("secret {}", secret.name_any());
    let _permit = writer.permit(WritePriority::Child).await?;
    match request::create(&secrets, &secret).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(None),
        Err(kube::Error::Api(status)) if !is_overload(&status) => {
            Ok(Some(Refusal { child, message: status.message.clone() }))
        }
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// Creates the group of the pods that start now, and deletes the groups of earlier pods.
async fn create_group(
    writer: &Writer,
    job: &ValidJob,
    group: &Group,
) -> Result<Outcome<DynamicObject>, ReconcileError> {
    let Group { resource, object, missing } = group;
    let groups = Api::<DynamicObject>::namespaced_with(writer.client.clone(), &job.namespace, resource);
    if job.first_incarnation() > 0 {
        writer.check_tenure()?;
        delete_other_groups(&groups, job, &object.name_any()).await?;
    }
    let child = format!("{} {}", resource.kind.to_lowercase(), object.name_any());
    create(writer, &groups, &Creation { child, object, owner: &job.uid, missing_kind: Some(missing) }).await
}

async fn delete_other_groups(groups: &Api<DynamicObject>, job: &ValidJob, name: &str) -> Result<(), ReconcileError> {
    let of_job = format!("{}={}", names::LABEL_JOB, job.name);
    let others = ListParams::default().labels(&of_job).fields(&format!("metadata.name!={name}"));
    let deleted = groups.delete_collection(&DeleteParams::default(), &others).await.map(drop);
    ignore_gone(deleted, || "delete the group of earlier pods".into())
}
