//! Nodes of a cluster of kind, which are containers: told to take no pods, stopped, cut off, and brought back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use crate::cluster::Cluster;
use crate::command::run;
use crate::wait::until;

/// Label of the nodes that the cluster itself runs on.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// Kind's network.
const NETWORK: &str = "kind";
/// A node is told to be silent after 40 to 50 s, and comes back within a minute.
const LIMIT: Duration = Duration::from_secs(150);

/// Names of the nodes that jobs run on, where others run the cluster; none in a cluster of one node.
///
/// # Errors
/// If the cluster does not answer.
pub async fn workers(cluster: &Cluster) -> Result<Vec<String>> {
    select(cluster, &format!("!{CONTROL_PLANE}")).await
}

/// Name of the node that runs the API server.
///
/// # Errors
/// If there is none to see.
pub async fn control_plane(cluster: &Cluster) -> Result<String> {
    select(cluster, CONTROL_PLANE).await?.pop().context("no node has the label of a control plane")
}

async fn select(cluster: &Cluster, selector: &str) -> Result<Vec<String>> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    Ok(nodes.list(&ListParams::default().labels(selector)).await?.iter().map(ResourceExt::name_any).collect())
}

/// Lets a node take pods or not; those that it has stay.
///
/// # Errors
/// If the cluster refuses.
pub async fn take_pods(cluster: &Cluster, node: &str, takes: bool) -> Result<()> {
    cluster.kubectl(&[if takes { "uncordon" } else { "cordon" }, node]).await?;
    Ok(())
}

/// How a node is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Its power is gone, and so is every process.
    Power,
    /// Its network is gone; its processes go on.
    Network,
}

/// A node that is lost.
#[derive(Debug)]
pub struct LostNode {
    pub name: String,
    loss: Loss,
    address: String,
}

impl LostNode {
    /// Takes power or network away from a node.
    ///
    /// # Errors
    /// If docker does not know the node.
    pub async fn lose(name: &str, loss: Loss) -> Result<Self> {
        let address = format!("{{{{(index .NetworkSettings.Networks \"{NETWORK}\").IPAddress}}}}");
        let address = run("docker", &["inspect", "--format", &address, name]).await?.trim().to_owned();
        match loss {
            Loss::Power => run("docker", &["kill", name]).await?,
            Loss::Network => run("docker", &["network", "disconnect", NETWORK, name]).await?,
        };
        Ok(Self { name: name.to_owned(), loss, address })
    }

    /// Waits until the cluster says that it does not hear the node.
    ///
    /// # Errors
    /// If it goes on hearing it.
    pub async fn until_silent(&self, cluster: &Cluster) -> Result<()> {
        self.until(cluster, "Unknown").await
    }

    /// Gives back what was taken, and waits until the node is ready.
    ///
    /// # Errors
    /// If it does not come back.
    pub async fn bring_back(self, cluster: &Cluster) -> Result<()> {
        ensure!(!self.address.is_empty(), "{} had no address", self.name);
        match self.loss {
            Loss::Power => run("docker", &["start", &self.name]).await?,
            Loss::Network => run("docker", &["network", "connect", "--ip", &self.address, NETWORK, &self.name]).await?,
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
