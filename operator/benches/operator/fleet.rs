//! Many jobs in a namespace of their own, and hands that play the kubelet for them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use http::header::{ACCEPT, HeaderValue};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Secret, Service};
use kube::api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::core::{PartialObjectMeta, Request};
use kube::{Api, Client, Resource, ResourceExt as _};
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, names};
use serde::Serialize;
use serde_json::{Value, json};

use crate::DEADLINE;
use crate::watching::Change;

/// Requests of this program under way at once.
const REQUESTS: usize = 64;

const METADATA: HeaderValue = HeaderValue::from_static("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1");

/// Jobs of one size.
pub struct Fleet {
    pub client: Client,
    pub namespace: String,
    pub jobs: usize,
    pub trainers: u32,
}

impl Fleet {
    pub async fn new(client: &Client, jobs: usize, trainers: u32) -> Result<Self> {
        Ok(Self { client: client.clone(), namespace: namespace(client).await?, jobs, trainers })
    }

    pub fn names(&self) -> Vec<String> {
        (0..self.jobs).map(|index| format!("job-{index}")).collect()
    }

    fn pods_of(&self, job: &str) -> Vec<String> {
        let trainers = (0..self.trainers).map(|index| names::pod(job, Role::Trainer, index));
        std::iter::once(names::pod(job, Role::Server, 0)).chain(trainers).collect()
    }

    /// The changes of all pods being created.
    pub fn creations(&self, jobs: &[String]) -> Vec<Change> {
        jobs.iter().flat_map(|job| self.pods_of(job)).map(Change::PodCreated).collect()
    }

    /// Creates jobs with `more` in their specs; when each of them was stored.
    pub async fn apply(&self, jobs: &[String], more: Value) -> Result<Vec<Instant>> {
        let api = Api::<ParameterServerJob>::namespaced(self.client.clone(), &self.namespace);
        let template = json!({"spec": {"containers": [{"name": "trainer", "image": "psjobs-worker:0.1.0", "args": ["train", "mnist"]}]}});
        let mut spec = more;
        spec["startupPolicy"] = "AnyOrder".into();
        spec["trainer"] = json!({"replicas": self.trainers, "template": template});
        let requests = jobs.iter().map(|name| {
            let object = json!({"metadata": {"name": name}, "spec": spec});
            let api = &api;
            async move {
                api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
                anyhow::Ok(Instant::now())
            }
        });
        stream::iter(requests.collect::<Vec<_>>()).buffered(REQUESTS).try_collect().await
    }

    /// The kubelets say that all pods run and are ready.
    pub async fn run(&self, jobs: &[String]) -> Result<()> {
        let pods = jobs.iter().flat_map(|job| self.pods_of(job)).collect::<Vec<_>>();
        let running = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        self.report(&pods, running, json!({"running": {}})).await.map(drop)
    }

    /// The kubelets say that these trainers, or servers, of all jobs ended well; when each was reported.
    pub async fn end(&self, jobs: &[String], role: Role, indexes: std::ops::Range<u32>) -> Result<Vec<Instant>> {
        let pods = jobs.iter().flat_map(|job| indexes.clone().map(|index| names::pod(job, role, index)));
        let ended = json!({"terminated": {"exitCode": 0, "finishedAt": Timestamp::now().to_string()}});
        self.report(&pods.collect::<Vec<_>>(), json!({"phase": "Succeeded"}), ended).await
    }

    /// Waits until so many events with this reason are written.
    pub async fn wait_for_events(&self, events: usize, reason: &str) -> Result<()> {
        let api = Api::<Event>::namespaced(self.client.clone(), &self.namespace);
        let with_reason = ListParams::default().fields(&format!("reason={reason}"));
        let all = async {
            let mut looks = tokio::time::interval(Duration::from_millis(200));
            loop {
                looks.tick().await;
                if api.list_metadata(&with_reason).await?.items.len() >= events {
                    return anyhow::Ok(());
                }
            }
        };
        tokio::time::timeout(DEADLINE, all)
            .await
            .with_context(|| format!("not all of {events} events {reason} came"))?
    }

    async fn report(&self, pods: &[String], status: Value, state: Value) -> Result<Vec<Instant>> {
        let api = Api::<Pod>::namespaced(self.client.clone(), &self.namespace);
        let requests = pods.iter().map(|name| {
            let container = if name.contains("-ps-") { "server" } else { "trainer" };
            let mut status = status.clone();
            status["containerStatuses"] = json!([{
                "name": container, "image": "i", "imageID": "i", "ready": true, "restartCount": 0, "state": state
            }]);
            let api = &api;
            async move {
                patch_status(api, name, &status).await?;
                anyhow::Ok(Instant::now())
            }
        });
        stream::iter(requests.collect::<Vec<_>>()).buffered(REQUESTS).try_collect().await
    }

    /// Deletes the namespace's jobs and what they own.
    pub async fn clear(&self) -> Result<()> {
        clear(&self.client, &self.namespace).await
    }
}

/// Changes an object's status. The answer is metadata alone: a kubelet's, in protobuf, costs the API server as little,
/// and this program on the same cores has no use for the rest.
pub async fn patch_status<K: Clone + Resource>(api: &Api<K>, name: &str, status: &impl Serialize) -> Result<()> {
    let patch = Patch::Merge(json!({ "status": status }));
    let request = Request::new(api.resource_url());
    let mut request = request.patch_subresource("status", name, &PatchParams::default(), &patch)?;
    request.headers_mut().insert(ACCEPT, METADATA);
    api.clone().into_client().request::<PartialObjectMeta>(request).await?;
    Ok(())
}

/// A new namespace.
pub async fn namespace(client: &Client) -> Result<String> {
    let metadata = ObjectMeta { generate_name: Some("bench-".into()), ..ObjectMeta::default() };
    let namespace = Namespace { metadata, ..Namespace::default() };
    Ok(Api::all(client.clone()).create(&PostParams::default(), &namespace).await?.name_any())
}

pub async fn clear(client: &Client, namespace: &str) -> Result<()> {
    let (now, all) =
        (DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::background() }, ListParams::default());
    Api::<ParameterServerJob>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Api::<Pod>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Api::<Service>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Api::<Secret>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Ok(())
}
