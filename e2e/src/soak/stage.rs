//! The surroundings that all parts of a soak share: the cluster, a namespace for each kind of job, the small disk, the records, and the
//! node that is away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use psjobs_api::Role;
use psjobs_api::crd::names;
use tokio::sync::Mutex;

use super::board::Board;
use super::disk::Disk;
use super::guard::Holder;
use super::kind::Kind;
use crate::cluster::Cluster;
use crate::namespace::TestNamespace;
use crate::nodes;

/// The cluster and everything on it that belongs to the soak.
pub struct Stage {
    pub cluster: Arc<Cluster>,
    pub board: Board,
    pub workers: Vec<String>,
    pub disk: Disk,
    /// The node that a fault has taken away. Locked from the decision on a fault until it has happened.
    pub away: Mutex<Option<String>>,
    namespaces: BTreeMap<Kind, TestNamespace>,
}

impl Stage {
    /// Makes the namespaces and the small disk.
    ///
    /// # Errors
    /// If the cluster is not one of kind with two workers, or refuses.
    pub async fn set_up(cluster: Arc<Cluster>) -> Result<Self> {
        let workers = if cluster.is_of_kind() { nodes::workers(&cluster).await? } else { Vec::new() };
        ensure!(
            workers.len() >= 2,
            "the soak takes nodes away, so it needs a cluster of kind with two workers; delete the cluster {}, and \
             the soak makes one, or set KUBECONFIG",
            cluster.context
        );
        let mut namespaces = BTreeMap::new();
        for kind in Kind::ALL {
            let name = format!("soak-{}", kind.name());
            namespaces.insert(kind, TestNamespace::prepare(cluster.clone(), &name).await?);
        }
        let disk = Disk::make(namespaces.get(&Kind::FullDisk).context("every kind has a namespace")?).await?;
        let away = Mutex::new(None);
        Ok(Self { cluster, board: Board::new(), workers, disk, away, namespaces })
    }

    /// Returns the namespace of a kind's jobs.
    pub fn namespace(&self, kind: Kind) -> &TestNamespace {
        self.namespaces.get(&kind).expect("every kind has a namespace")
    }

    /// Returns the pods of all jobs of the soak.
    ///
    /// # Errors
    /// If the cluster does not answer.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let of_jobs = ListParams::default().labels(names::LABEL_JOB);
        let pods = Api::<Pod>::all(self.cluster.client.clone()).list(&of_jobs).await?.items;
        let is_ours = |pod: &Pod| {
            let namespace = pod.namespace();
            self.namespaces.values().any(|ours| Some(&ours.name) == namespace.as_ref())
        };
        Ok(pods.into_iter().filter(is_ours).collect())
    }

    /// Returns the servers of jobs that live on two servers, from those of [`Stage::pods`].
    pub fn holders(&self, pods: &[Pod]) -> Vec<Holder> {
        let now = Timestamp::now();
        let of_two = Kind::ALL.into_iter().filter(|kind| kind.lives_on_two_servers());
        let namespaces: Vec<&str> = of_two.map(|kind| self.namespace(kind).name.as_str()).collect();
        let holder = |pod: &Pod| {
            let namespace = pod.namespace().filter(|name| namespaces.contains(&name.as_str()))?;
            let is_server = pod.labels().get(names::LABEL_ROLE)? == Role::Server.as_str();
            let job = (namespace, pod.labels().get(names::LABEL_JOB)?.clone());
            let ready = ready_since(pod).and_then(|since| Duration::try_from(now.duration_since(since)).ok());
            is_server.then(|| Holder { job, pod: pod.name_any(), node: node_of(pod).map(str::to_owned), ready })
        };
        pods.iter().filter_map(holder).collect()
    }
}

/// Returns the node of a pod.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Returns the name of a pod's job.
pub fn job_of(pod: &Pod) -> Option<&str> {
    pod.labels().get(names::LABEL_JOB).map(String::as_str)
}

/// Returns since when the pod is ready, if it is.
fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    ready.last_transition_time.as_ref().map(|time| time.0)
}
