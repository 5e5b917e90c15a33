//! The limit: a client that creates the same objects as the operator does, and nothing else. A watch notes when they
//! exist, as for the operator, because it reports later than the answers do, and costs the API server something too.
//! Also one that writes the same last statuses, when a watch reports that the pods have ended.

use std::collections::{HashMap, HashSet};
use std::future::ready;
use std::time::Instant;

use anyhow::{Context as _, Result};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::api::{ListParams, ObjectMeta, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, Phase};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::fleet::patch_status;
use crate::watching::{Change, Journal};

/// Requests under way at once; more do not make this API server faster.
const REQUESTS: usize = 64;

/// Seconds that creating the pods, services and certificates of `from` in `to` takes, until the last pod is reported.
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
            // Without the label of a job: these belong to no job, and the operator does not look at them.
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

/// The statuses with which jobs ended, by name.
pub struct Ends(HashMap<String, End>);

/// A status in two halves.
struct End {
    before: Map<String, Value>,
    /// The metadata after the last write.
    last: Map<String, Value>,
}

impl Ends {
    /// Finds the jobs of a namespace that have ended.
    pub async fn of(client: &Client, namespace: &str) -> Result<Self> {
        let halves = |job: ParameterServerJob| {
            let Value::Object(mut last) = serde_json::to_value(&job.status)? else { anyhow::bail!("no status") };
            let mut before = last.clone();
            before.insert("phase".into(), serde_json::to_value(Phase::Running)?);
            before.remove("completionTime");
            if let Some(conditions) = before.get_mut("conditions").and_then(Value::as_array_mut) {
                conditions.retain(|condition| condition["type"] != "Succeeded");
            }
            last.retain(|key, value| before.get(key) != Some(value));
            Ok((job.name_any(), End { before, last }))
        };
        Ok(Self(list::<ParameterServerJob>(client, namespace).await?.into_iter().map(halves).collect::<Result<_>>()?))
    }

    /// Jobs of these names are as they were before their ends.
    pub async fn begin(&self, client: &Client, namespace: &str) -> Result<()> {
        let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), namespace);
        let all = stream::iter(self.0.iter().map(|(name, end)| patch_status(&jobs, name, &end.before)));
        all.buffer_unordered(REQUESTS).try_for_each(async |()| Ok(())).await
    }

    /// Writes the last status of each, as soon as so many of its pods have ended; `heard` is of how many of all.
    pub async fn write(
        &self,
        client: &Client,
        namespace: &str,
        pods: usize,
        heard: watch::Sender<usize>,
    ) -> Result<()> {
        let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), namespace);
        let watched = watcher(Api::<Pod>::namespaced(client.clone(), namespace), watcher::Config::default());
        let mut ended = HashMap::<String, HashSet<String>>::new();
        let mut completes = |pod: Pod| {
            let name = ended_well(&pod).then(|| pod.name_any())?;
            let (job, _) = name.split_once("-ps-").or_else(|| name.split_once("-trainer-"))?;
            let job = job.to_owned();
            let of_job = ended.entry(job.clone()).or_default();
            let new = of_job.insert(name);
            heard.send_modify(|count| *count += usize::from(new));
            (new && of_job.len() == pods).then_some(job)
        };
        let done = watched.default_backoff().applied_objects();
        let done = done.filter_map(|pod| ready(pod.ok().and_then(&mut completes)));
        let writes = done.map(async |job| {
            let end = self.0.get(&job).with_context(|| format!("{job} had an end"))?;
            patch_status(&jobs, &job, &end.last).await
        });
        writes.buffer_unordered(REQUESTS).take(self.0.len()).try_for_each(async |()| Ok(())).await
    }
}

fn ended_well(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Succeeded"))
}
