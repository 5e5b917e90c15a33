//! The limit: a client that creates the same objects as the operator does, and nothing else. A watch notes when they
//! exist, as for the operator, because it tells later than the answers do, and costs the API server something too.

use std::time::Instant;

use anyhow::Result;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::api::{ListParams, ObjectMeta, PostParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::watching::{Change, Journal};

/// Requests under way at once; more do not make this API server faster.
const REQUESTS: usize = 64;

/// Seconds that creating the pods, services and certificates of `from` in `to` takes, until the last pod is told of.
pub async fn copy(client: &Client, from: &str, to: &str) -> Result<f64> {
    let mut journal = Journal::of(client, to);
    let pods = as_new(list::<Pod>(client, from).await?, to, |pod| pod.status = None);
    let services = as_new(list::<Service>(client, from).await?, to, |service| service.status = None);
    let secrets = as_new(list::<Secret>(client, from).await?, to, |_| ());
    let creations = pods.iter().map(|pod| Change::PodCreated(pod.name_any())).collect::<Vec<_>>();
    let begin = Instant::now();
    create(client, to, &secrets).await?;
    create(client, to, &services).await?;
    create(client, to, &pods).await?;
    let last = journal.all(&creations).await?.into_iter().max().unwrap_or(begin);
    Ok(last.duration_since(begin).as_secs_f64())
}

async fn list<K>(client: &Client, namespace: &str) -> Result<Vec<K>>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    Ok(Api::<K>::namespaced(client.clone(), namespace).list(&ListParams::default()).await?.items)
}

fn as_new<K: Resource>(mut objects: Vec<K>, namespace: &str, reset: impl Fn(&mut K)) -> Vec<K> {
    for object in &mut objects {
        let meta = object.meta_mut();
        *meta = ObjectMeta {
            name: meta.name.take(),
            namespace: Some(namespace.to_owned()),
            // Without the label of a job: these are nobody's, and the operator does not look at them.
            labels: meta.labels.take().map(|labels| {
                labels.into_iter().map(|(key, value)| (key.replace("psjobs.dev", "bare"), value)).collect()
            }),
            annotations: meta.annotations.take(),
            owner_references: meta.owner_references.take(),
            ..ObjectMeta::default()
        };
        reset(object);
    }
    objects
}

async fn create<K>(client: &Client, namespace: &str, objects: &[K]) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    K: Clone + std::fmt::Debug + DeserializeOwned + Serialize,
{
    let api = Api::<K>::namespaced(client.clone(), namespace);
    let params = PostParams::default();
    let requests = objects.iter().map(|object| api.create(&params, object)).collect::<Vec<_>>();
    stream::iter(requests).buffer_unordered(REQUESTS).try_for_each(async |_| Ok(())).await?;
    Ok(())
}
