//! Creates the objects that a job's pods need before they exist: certificates, a volume, a network policy, and the group
//! that they are scheduled in.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, ListParams};
use kube::core::DynamicObject;
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::names;

use super::certificates::create_certificates;
use super::create::{Creation, Outcome, create};
use super::request::ignore_gone;
use super::writer::Writer;
use crate::controller::build::{self, Group};
use crate::controller::cache::job_state::JobStates;
use crate::controller::error::ReconcileError;
use crate::controller::model::{ObservedState, Refusal};
use crate::controller::validate::ValidJob;

/// Creates the objects in order. Returns the first refusal, if there is one.
pub async fn create_prerequisites(
    writer: &Writer,
    states: &JobStates,
    job: &ValidJob,
    observed: &mut ObservedState,
) -> Result<Option<Refusal>, ReconcileError> {
    if let Some(refusal) = create_certificates(writer, states, job, observed).await? {
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
