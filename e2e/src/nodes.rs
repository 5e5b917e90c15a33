//! Nodes of a kind cluster, which are containers: cordoned, stopped, disconnected, left without kubelet, and brought back.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use crate::cluster::Cluster;
use crate::command::run;
use crate::wait::{until, until_ok};

/// Label of the control plane's nodes.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// Docker network of kind.
const NETWORK: &str = "kind";
/// Cgroups that freeze the processes of docker's containers, in version 1.
const FREEZER: &str = "/sys/fs/cgroup/freezer/docker";
/// Deadline of stopping the processes of a node.
const FREEZING: Duration = Duration::from_secs(30);
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

/// Kills the process of a pod's first container with SIGKILL.
///
/// # Errors
/// If the pod has no process on this node.
pub async fn kill_process(node: &str, namespace: &str, pod: &str) -> Result<()> {
    let labels = format!("--label io.kubernetes.pod.name={pod} --label io.kubernetes.pod.namespace={namespace}");
    let container = format!("$(crictl ps --quiet {labels})");
    let process = format!("$(crictl inspect --output go-template --template '{{{{.info.pid}}}}' {container})");
    run("docker", &["exec", node, "sh", "-c", &format!("kill -KILL {process}")]).await?;
    Ok(())
}

/// The way in which a node is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Power: every process is killed.
    Power,
    /// Network: the processes go on without it.
    Network,
    /// Its processes are stopped, and go on when it is back.
    Paused,
    /// Its kubelet: the containers go on.
    Kubelet,
}

/// Returns the address of a node in kind's network.
///
/// # Errors
/// If docker has no such node, or not in that network.
pub async fn address(node: &str) -> Result<String> {
    let address = format!("{{{{(index .NetworkSettings.Networks \"{NETWORK}\").IPAddress}}}}");
    let address = run("docker", &["inspect", "--format", &address, node]).await?.trim().to_owned();
    ensure!(!address.is_empty(), "{node} has no address in docker's network {NETWORK}");
    Ok(address)
}

/// Stops the processes of a node. Docker gives up where some of them start others faster than it stops them ("unable to
/// freeze"), and lets all go on: then it is asked again.
async fn pause(node: &str) -> Result<String> {
    until_ok(FREEZING, &format!("docker to pause {node}"), async || run("docker", &["pause", node]).await).await
}

/// A node that is lost.
#[derive(Debug)]
pub struct LostNode {
    pub name: String,
    loss: Loss,
    address: String,
}

impl LostNode {
    /// Kills, disconnects or pauses a node, or stops its kubelet.
    ///
    /// # Errors
    /// If docker does not know the node.
    pub async fn lose(name: &str, loss: Loss) -> Result<Self> {
        let address = address(name).await?;
        match loss {
            Loss::Power => switch_off(name).await?,
            Loss::Network => run("docker", &["network", "disconnect", NETWORK, name]).await?,
            Loss::Paused => pause(name).await?,
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

    /// Undoes the loss, and waits until the node is Ready.
    ///
    /// # Errors
    /// If it does not become Ready.
    pub async fn bring_back(self, cluster: &Cluster) -> Result<()> {
        match self.loss {
            Loss::Power => run("docker", &["start", &self.name]).await?,
            Loss::Network => run("docker", &["network", "connect", NETWORK, &self.name]).await?,
            Loss::Paused => run("docker", &["unpause", &self.name]).await?,
            Loss::Kubelet => run("docker", &["exec", &self.name, "systemctl", "start", "kubelet"]).await?,
        };
        // Docker gives a container the lowest address that is free, and takes wishes only for networks with a subnet that
        // somebody has chosen. A node is known to the cluster by its address.
        let (before, now) = (&self.address, address(&self.name).await?);
        ensure!(*before == now, "{} had the address {before} and is back with {now}; make the cluster anew", self.name);
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

/// Kills a node's container. With cgroups of version 1 the node's own runtime freezes a container while it starts it; a
/// process that is frozen does not die, and docker gives up waiting for it. So what is frozen is thawed then.
async fn switch_off(node: &str) -> Result<String> {
    let killed = run("docker", &["kill", node]).await;
    if killed.is_ok() {
        return killed;
    }
    let id = run("docker", &["inspect", "--format", "{{.Id}}", node]).await?;
    if thaw(&Path::new(FREEZER).join(id.trim())) == 0 {
        return killed;
    }
    run("docker", &["wait", node]).await
}

/// Thaws what is frozen in a folder of cgroups; returns how many were.
fn thaw(folder: &Path) -> usize {
    let state = folder.join("freezer.state");
    let is_frozen = fs::read_to_string(&state).is_ok_and(|state| state.trim() == "FROZEN");
    let thawed = is_frozen && fs::write(&state, "THAWED").is_ok();
    let below = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    usize::from(thawed) + below.filter(|path| path.is_dir()).map(|path| thaw(&path)).sum::<usize>()
}
