//! Nodes of a kind cluster, which are containers: cordoned, stopped, disconnected, left without kubelet, and brought back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use crate::cluster::Cluster;
use crate::command::run;
use crate::wait::until;

/// Label of the control plane's nodes.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// Docker network of kind.
const NETWORK: &str = "kind";
/// Deadline of a node's change of state: it is NotReady after 40 to 50 s, and Ready again within a minute.
const LIMIT: Duration = Duration::from_secs(150);

/// Returns the names of the worker nodes; none in a cluster of one node.
///
/// # Errors
/// If the cluster does not answer.
pub async fn workers(cluster: &Cluster) -> Result<Vec<String>> {
    select(cluster, &format!("!{CONTROL_PLANE}")).await
}

/// Returns the name of the node that runs the API server.
///
/// # Errors
/// If no node has the label of a control plane.
pub async fn control_plane(cluster: &Cluster) -> Result<String> {
    select(cluster, CONTROL_PLANE).await?.pop().context("no node has the label of a control plane")
}

async fn select(cluster: &Cluster, selector: &str) -> Result<Vec<String>> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    Ok(nodes.list(&ListParams::default().labels(selector)).await?.iter().map(ResourceExt::name_any).collect())
}

/// Cordons or uncordons a node; its pods stay.
///
/// # Errors
/// If the cluster refuses.
pub async fn take_pods(cluster: &Cluster, node: &str, takes: bool) -> Result<()> {
    cluster.kubectl(&[if takes { "uncordon" } else { "cordon" }, node]).await?;
    Ok(())
}

/// The way in which a node is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Power: every process is killed.
    Power,
    /// Network: the processes go on without it.
    Network,
    /// Kubelet: the processes go on with their network, and the cluster hears nothing of them.
    Kubelet,
}

/// A node that is lost.
#[derive(Debug)]
pub struct LostNode {
    pub name: String,
    loss: Loss,
    address: String,
}

impl LostNode {
    /// Kills or disconnects a node, or stops its kubelet.
    ///
    /// # Errors
    /// If docker does not know the node.
    pub async fn lose(name: &str, loss: Loss) -> Result<Self> {
        let address = format!("{{{{(index .NetworkSettings.Networks \"{NETWORK}\").IPAddress}}}}");
        let address = run("docker", &["inspect", "--format", &address, name]).await?.trim().to_owned();
        match loss {
            Loss::Power => run("docker", &["kill", name]).await?,
            Loss::Network => run("docker", &["network", "disconnect", NETWORK, name]).await?,
            Loss::Kubelet => run("docker", &["exec", name, "systemctl", "stop", "kubelet"]).await?,
        };
        Ok(Self { name: name.to_owned(), loss, address })
    }

    /// Waits until the node is NotReady (its condition Ready is Unknown).
    ///
    /// # Errors
    /// If the node stays Ready.
    pub async fn until_silent(&self, cluster: &Cluster) -> Result<()> {
        self.until(cluster, "Unknown").await
    }

    /// Starts or reconnects the node or starts its kubelet, and waits until it is Ready.
    ///
    /// # Errors
    /// If it does not become Ready.
    pub async fn bring_back(self, cluster: &Cluster) -> Result<()> {
        ensure!(!self.address.is_empty(), "{} had no address", self.name);
        match self.loss {
            Loss::Power => run("docker", &["start", &self.name]).await?,
            Loss::Network => run("docker", &["network", "connect", "--ip", &self.address, NETWORK, &self.name]).await?,
            Loss::Kubelet => run("docker", &["exec", &self.name, "systemctl", "start", "kubelet"]).await?,
        };
        self.until(cluster, "True").await
    }

    async fn until(&self, cluster: &Cluster, ready: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let is = |node: Option<&Node>| {
            let conditions = node.and_then(|node| node.status.as_ref()?.conditions.as_ref());
            conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == ready))
        };
        until(&nodes, &self.name, LIMIT, &format!("node {} to be Ready={ready}", self.name), is).await?;
        Ok(())
    }
}
