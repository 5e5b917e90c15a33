//! Carries decisions out. Creating is safe to repeat, because names follow from the job, and deleting
//! is, because a delete names the uid that it means.

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, Client, Resource, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::decide::{Child, Deletion, Refusal, World};
use super::dereference::is_owned;
use super::observe::observe;
use super::validate::ValidJob;
use super::{Context, ReconcileError, build};

/// Requests of one job under way at once.
const REQUESTS_OF_JOB: usize = 32;

/// What became of a child that was to be created.
enum Outcome<K> {
    Exists(Box<K>),
    Refused(Refusal),
}

/// Creates children at once, and tells the world what became of them. How many exist now.
pub async fn create(
    context: &Context,
    job: &ValidJob,
    children: &[Child],
    world: &mut World,
) -> Result<usize, ReconcileError> {
    let Context { client, worker_image, .. } = context;
    let pods = Api::<Pod>::namespaced(client.clone(), &job.namespace);
    let services = Api::<Service>::namespaced(client.clone(), &job.namespace);
    let service = async {
        if !children.contains(&Child::Service) {
            return Ok(None);
        }
        // The claim comes first, so that a service that exists stands for both.
        if let Some(claim) = build::claim(job) {
            let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), &job.namespace);
            // Boxed: together the requests' states would fill a thread's stack.
            let created = Box::pin(create_one(context, &claims, &claim, &job.uid)).await?;
            if let Outcome::Refused(refusal) = created {
                return Ok(Some(Outcome::Refused(refusal)));
            }
        }
        Box::pin(create_one(context, &services, &build::service(job), &job.uid)).await.map(Some)
    };
    let mut requests = Vec::new();
    for child in children {
        if let Child::Pod(new) = child {
            let pods = &pods;
            // Built when its turn comes, so that a thousand of them need not exist at once.
            requests
                .push(async move { create_one(context, pods, &build::pod(job, new, worker_image), &job.uid).await });
        }
    }
    let requests = stream::iter(requests).buffered(REQUESTS_OF_JOB).try_collect::<Vec<_>>();
    let (service, outcomes) = futures::try_join!(service, requests)?;
    match service {
        Some(Outcome::Exists(_)) => world.service = true,
        Some(Outcome::Refused(refusal)) => world.refused.push(refusal),
        None => {}
    }
    for outcome in outcomes {
        match outcome {
            Outcome::Exists(pod) => world.pods.extend(observe(&pod)),
            Outcome::Refused(refusal) => world.refused.push(refusal),
        }
    }
    Ok(children.len() - world.refused.len())
}

/// Creates an object, or finds that it exists: our cache may be a moment behind our own writes.
async fn create_one<K>(context: &Context, api: &Api<K>, object: &K, owner: &str) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let name = object.name_any();
    let child = format!("{} {name}", K::kind(&()).to_lowercase());
    let _turn = context.turn(context.turns.child()).await;
    let refused = |message| Ok(Outcome::Refused(Refusal { child: child.clone(), message }));
    match api.create(&PostParams::default(), object).await {
        Ok(created) => Ok(Outcome::Exists(created.into())),
        Err(kube::Error::Api(status)) if status.is_already_exists() => match api.get_opt(&name).await {
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
        Err(kube::Error::Api(status)) if !is_passing(&status) => refused(status.message.clone()),
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// The API server has no time now; that says nothing about the object.
fn is_passing(status: &Status) -> bool {
    matches!(status.code, 429 | 503 | 504)
}

/// Deletes pods; one that is gone, or whose name another pod has by now, is none to delete.
pub async fn delete(context: &Context, namespace: &str, deletions: &[Deletion]) -> Result<(), ReconcileError> {
    let pods = Api::<Pod>::namespaced(context.client.clone(), namespace);
    let mut requests = Vec::new();
    for deletion in deletions {
        requests.push(delete_one(context, &pods, deletion));
    }
    stream::iter(requests).buffer_unordered(REQUESTS_OF_JOB).try_collect().await
}

async fn delete_one(context: &Context, pods: &Api<Pod>, deletion: &Deletion) -> Result<(), ReconcileError> {
    let _turn = context.turn(context.turns.child()).await;
    let mut params = DeleteParams::default().preconditions(only(&deletion.uid));
    if deletion.force {
        params = params.grace_period(0);
    }
    settled(pods.delete(&deletion.name, &params).await.map(drop), || format!("delete pod {}", deletion.name))
}

/// Deletes the job itself; its children follow it as owned objects do.
pub async fn delete_job(client: &Client, job: &ParameterServerJob) -> Result<(), ReconcileError> {
    let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), &job.namespace().unwrap_or_default());
    let params = DeleteParams::background().preconditions(only(&job.uid().unwrap_or_default()));
    settled(jobs.delete(&job.name_any(), &params).await.map(drop), || "delete the job after its ttl".into())
}

fn only(uid: &str) -> Preconditions {
    Preconditions { uid: Some(uid.to_owned()), resource_version: None }
}

fn settled(result: kube::Result<()>, what: impl FnOnce() -> String) -> Result<(), ReconcileError> {
    match result {
        // 404: it is gone. 409: the uid is another one's.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        Err(source) => Err(ReconcileError::Api { what: what(), source: Box::new(source) }),
        Ok(()) => Ok(()),
    }
}
