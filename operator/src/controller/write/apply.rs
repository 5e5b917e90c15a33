//! Carries decisions out. Creating is safe to repeat, because names follow from the job, and deleting
//! is, because a delete names the uid that it means.

use std::time::Instant;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams};
use kube::core::{ApiResource, DynamicObject, Status};
use kube::{Api, Resource, ResourceExt as _};
use psjobs_api::Role;
use psjobs_api::crd::names;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tracing::Instrument as _;

use super::request::{self, ignore_gone};
use super::write_priority::WritePriority;
use super::writer::REQUESTS_OF_JOB;
use crate::controller::cache::observed_state::is_owned;
use crate::controller::cache::pods::CachedPod;
use crate::controller::context::Context;
use crate::controller::error::ReconcileError;
use crate::controller::model::{Child, NewPod, ObservedState, Refusal};
use crate::controller::observe::observe;
use crate::controller::validate::ValidJob;
use crate::controller::{build, shard};
use crate::traces;

/// What became of a child that was to be created.
enum Outcome<K> {
    /// As it was sent, with this metadata.
    Created(Box<ObjectMeta>),
    Exists(Box<K>),
    Refused(Refusal),
}

/// An object to create.
struct Wanted<'a, K> {
    /// `pod mnist-ps-0`
    child: String,
    object: &'a K,
    /// Uid of the job that owns it.
    owner: &'a str,
    /// What to say where its kind does not exist.
    missing: Option<&'a str>,
}

/// Creates children at once, after what they need, and tells the observed what became of them. How many exist now.
pub async fn create(
    context: &Context,
    job: &ValidJob,
    children: &[Child],
    observed: &mut ObservedState,
) -> Result<usize, ReconcileError> {
    if begins(job, children)
        && let Some(refusal) = Box::pin(prepare(context, job)).await?
    {
        observed.refused.push(refusal);
        return Ok(0);
    }
    let services = Api::<Service>::namespaced(context.writer.client.clone(), &job.namespace);
    let service = async {
        if !children.contains(&Child::Service) {
            return Ok(None);
        }
        let (service, unseen) = (build::service(job), &context.children.new_services);
        let request = unseen.request(&job.namespace, &service.name_any());
        // Boxed: together the requests' states would fill a thread's stack.
        let outcome = Box::pin(create_one(context, &services, &wanted(&service, &job.uid))).await?;
        if let Outcome::Created(_) = outcome {
            request.created(job.uid.clone(), Instant::now());
        }
        Ok(Some(outcome))
    };
    let mut requests = Vec::new();
    for child in children {
        if let Child::Pod(new) = child {
            let span = traces::child(|| format!("pod {}", names::pod(&job.name, new.replica.role, new.replica.index)));
            requests.push(create_pod(context, job, new).instrument(span));
        }
    }
    let requests = stream::iter(requests).buffered(REQUESTS_OF_JOB).try_collect::<Vec<_>>();
    let (service, outcomes) = futures::try_join!(service, requests)?;
    match service {
        Some(Outcome::Created(_) | Outcome::Exists(_)) => observed.service = true,
        Some(Outcome::Refused(refusal)) => observed.refused.push(refusal),
        None => {}
    }
    for outcome in outcomes {
        match outcome {
            Ok(pod) => observed.pods.extend(observe(&pod)),
            Err(refusal) => observed.refused.push(refusal),
        }
    }
    Ok(children.len() - observed.refused.len())
}

/// Whether the job's pods start now, all of them: the first time, or again after a suspension or a restart.
fn begins(job: &ValidJob, children: &[Child]) -> bool {
    let first = first_incarnation(job);
    let is_first = |child: &Child| match child {
        Child::Service => true,
        Child::Pod(new) => new.replica.role == Role::Server && new.incarnation == first,
    };
    children.iter().any(is_first)
}

/// The incarnation that the job's pods began with when all of them last started.
fn first_incarnation(job: &ValidJob) -> u32 {
    job.object.status.as_ref().map_or(0, |status| status.first_incarnation.unsigned_abs())
}

/// Creates what pods need before they are there: certificates, a volume, rules of the network, a group to be scheduled in.
/// The first refusal, if there is one.
async fn prepare(context: &Context, job: &ValidJob) -> Result<Option<Refusal>, ReconcileError> {
    let client = || context.writer.client.clone();
    if let Some(refusal) = create_certificates(context, job).await? {
        return Ok(Some(refusal));
    }
    if let Some(claim) = build::claim(job) {
        let claims = Api::<PersistentVolumeClaim>::namespaced(client(), &job.namespace);
        if let Outcome::Refused(refusal) = create_one(context, &claims, &wanted(&claim, &job.uid)).await? {
            return Ok(Some(refusal));
        }
    }
    if let Some(policy) = build::policy(job) {
        let policies = Api::<NetworkPolicy>::namespaced(client(), &job.namespace);
        if let Outcome::Refused(refusal) = create_one(context, &policies, &wanted(&policy, &job.uid)).await? {
            return Ok(Some(refusal));
        }
    }
    for build::Group { resource, object, missing } in build::groups(job) {
        let groups = Api::<DynamicObject>::namespaced_with(client(), &job.namespace, &resource);
        if first_incarnation(job) > 0 {
            delete_others(&groups, job, &object.name_any()).await?;
        }
        let child = format!("{} {}", resource.kind.to_lowercase(), object.name_any());
        let group = Wanted { child, object: &object, owner: &job.uid, missing: Some(&missing) };
        if let Outcome::Refused(refusal) = create_one(context, &groups, &group).await? {
            return Ok(Some(refusal));
        }
    }
    Ok(None)
}

/// Makes the certificates of the pods that start now. The operator may create Secrets and not read them: one that
/// exists is ours, because its name says so.
async fn create_certificates(context: &Context, job: &ValidJob) -> Result<Option<Refusal>, ReconcileError> {
    let Some(secret) = build::secret(job, Timestamp::now())? else { return Ok(None) };
    let secrets = Api::<Secret>::namespaced(context.writer.client.clone(), &job.namespace);
    let child = format!("secret {}", secret.name_any());
    let _permit = context.writer.permit(WritePriority::Child).await;
    match request::create(&secrets, &secret).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(None),
        Err(kube::Error::Api(status)) if !is_passing(&status) => {
            Ok(Some(Refusal { child, message: status.message.clone() }))
        }
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// Deletes the groups of pods that the job had before.
async fn delete_others(groups: &Api<DynamicObject>, job: &ValidJob, name: &str) -> Result<(), ReconcileError> {
    let of_job = format!("{}={}", names::LABEL_JOB, job.name);
    let others = ListParams::default().labels(&of_job).fields(&format!("metadata.name!={name}"));
    let deleted = groups.delete_collection(&DeleteParams::default(), &others).await.map(drop);
    ignore_gone(deleted, || "delete the group of earlier pods".into())
}

async fn create_pod(context: &Context, job: &ValidJob, new: &NewPod) -> Result<Result<Pod, Refusal>, ReconcileError> {
    // Before it is built: those that wait for their turn are thousands, and would be most of the operator's memory.
    let _permit = context.writer.permit(WritePriority::Child).await;
    let pod = traces::step("build").in_scope(|| build::pod(job, new, &context.worker_image));
    let request = context.children.new_pods.request(&job.namespace, &pod.name_any());
    let outcome = match build::scheduling_group(job) {
        Some(group) => Box::pin(create_grouped_pod(context, job, &pod, group)).await?,
        None => {
            let pods = Api::<Pod>::namespaced(context.writer.client.clone(), &job.namespace);
            create_now(&pods, &wanted(&pod, &job.uid)).await?
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

/// Creates a pod with a field that its type here does not have.
async fn create_grouped_pod(
    context: &Context,
    job: &ValidJob,
    pod: &Pod,
    group: Value,
) -> Result<Outcome<Pod>, ReconcileError> {
    let resource = ApiResource::erase::<Pod>(&());
    let pods = Api::<DynamicObject>::namespaced_with(context.writer.client.clone(), &job.namespace, &resource);
    let mut object = serde_json::to_value(pod).map_err(ReconcileError::Json)?;
    object["spec"]["schedulingGroup"] = group;
    let object = serde_json::from_value(object).map_err(ReconcileError::Json)?;
    let child = format!("pod {}", pod.name_any());
    let grouped = Wanted { child, object: &object, owner: &job.uid, missing: None };
    match create_now(&pods, &grouped).await? {
        Outcome::Created(metadata) => Ok(Outcome::Created(metadata)),
        Outcome::Exists(object) => {
            let object = serde_json::to_value(object).map_err(ReconcileError::Json)?;
            Ok(Outcome::Exists(Box::new(serde_json::from_value(object).map_err(ReconcileError::Json)?)))
        }
        Outcome::Refused(refusal) => Ok(Outcome::Refused(refusal)),
    }
}

fn wanted<'a, K: Resource<DynamicType = ()>>(object: &'a K, owner: &'a str) -> Wanted<'a, K> {
    let child = format!("{} {}", K::kind(&()).to_lowercase(), object.name_any());
    Wanted { child, object, owner, missing: None }
}

/// Creates an object in its turn.
async fn create_one<K>(context: &Context, api: &Api<K>, wanted: &Wanted<'_, K>) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let creating = async {
        let _permit = context.writer.permit(WritePriority::Child).await;
        create_now(api, wanted).await
    };
    creating.instrument(traces::child(|| wanted.child.clone())).await
}

/// Creates an object, or finds that it exists: our cache may be a moment behind our own writes.
async fn create_now<K>(api: &Api<K>, wanted: &Wanted<'_, K>) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let Wanted { child, object, owner, missing } = wanted;
    let name = object.name_any();
    let refused = |message| Ok(Outcome::Refused(Refusal { child: child.clone(), message }));
    match request::create(api, *object).await {
        Ok(metadata) => Ok(Outcome::Created(metadata.into())),
        Err(kube::Error::Api(status)) if status.is_already_exists() => match api.get_opt(&name).await {
            Ok(Some(existing)) if is_owned(&existing, owner) && !shard::same(&existing, *object) => {
                Err(ReconcileError::Disputed { child: child.clone() })
            }
            Ok(Some(existing)) if is_owned(&existing, owner) => Ok(Outcome::Exists(existing.into())),
            Ok(Some(existing)) if existing.meta().deletion_timestamp.is_some() => {
                refused(format!("an earlier {child} is still being deleted"))
            }
            Ok(Some(_)) => refused(format!(
                "there is another {child} that does not belong to this job; delete it or give the job another name"
            )),
            Ok(None) => refused(format!("an earlier {child} was just deleted")),
            Err(source) => Err(ReconcileError::Api { what: format!("read {child}"), source: Box::new(source) }),
        },
        Err(kube::Error::Api(status)) if status.code == 404 && missing.is_some() => {
            refused(missing.unwrap_or_default().to_owned())
        }
        Err(kube::Error::Api(status)) if !is_passing(&status) => refused(status.message.clone()),
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// The API server has no time now; that says nothing about the object.
fn is_passing(status: &Status) -> bool {
    matches!(status.code, 429 | 503 | 504)
}
