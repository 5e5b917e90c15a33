//! The operator's pods: finds the leader, kills and scales them.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};

use crate::cluster::{Cluster, SYSTEM};
use crate::namespace::phase_of;
use crate::nodes::kill_process;
use crate::wait::{SHORT, until};

/// Names of the operator's lease and of the chart's Deployment.
const LEASE: &str = "psjobs-operator";
const DEPLOYMENT: &str = "psjobs";

/// Returns the names of the operator's running pods.
///
/// # Errors
/// If the cluster does not answer.
pub async fn running(cluster: &Cluster) -> Result<Vec<String>> {
    let ours = ListParams::default().labels("app.kubernetes.io/instance=psjobs,app.kubernetes.io/component=operator");
    let mut pods = pods(cluster).list(&ours).await?.items;
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none() && phase_of(pod) == Some("Running"));
    Ok(pods.iter().map(ResourceExt::name_any).collect())
}

/// Returns the node of an operator's pod.
///
/// # Errors
/// If it has no node.
pub async fn node_of(cluster: &Cluster, pod: &str) -> Result<String> {
    let node = pods(cluster).get(pod).await?.spec.and_then(|spec| spec.node_name);
    node.with_context(|| format!("{pod} is on no node"))
}

/// Waits for a leader for which `is` holds, and returns its pod's name.
///
/// # Errors
/// If that takes longer than `limit`.
pub async fn leader(cluster: &Cluster, is: impl Fn(&str) -> bool, limit: Duration) -> Result<String> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let holder = |lease: Option<&Lease>| lease?.spec.as_ref()?.holder_identity.clone().filter(|name| !name.is_empty());
    let wanted = |lease: Option<&Lease>| holder(lease).is_some_and(|name| is(&name));
    let lease = until(&leases, LEASE, limit, "another operator to lead", wanted).await?;
    holder(lease.as_ref()).context("somebody leads")
}

/// Kills an operator's process with SIGKILL, in a kind cluster, and deletes its pod, because the kubelet would delay
/// the restarts of a container that crashes again and again.
///
/// # Errors
/// If there is no such process.
pub async fn kill(cluster: &Cluster, pod: &str) -> Result<()> {
    let node = node_of(cluster, pod).await?;
    kill_process(&node, SYSTEM, pod).await?;
    match pods(cluster).delete(pod, &DeleteParams::default().grace_period(0)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => bail!(error),
    }
}

/// Scales the operator's Deployment, and waits until all replicas are ready.
///
/// # Errors
/// If they are not ready within [`SHORT`].
pub async fn scale(cluster: &Cluster, operators: i32) -> Result<()> {
    let (deployment, replicas) = (format!("deployment/{DEPLOYMENT}"), format!("--replicas={operators}"));
    cluster.kubectl(&["--namespace", SYSTEM, "scale", &deployment, &replicas]).await?;
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let ready = |deployment: Option<&Deployment>| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        status.is_some_and(|status| {
            status.ready_replicas.unwrap_or(0) == operators && status.replicas.unwrap_or(0) == operators
        })
    };
    until(&deployments, DEPLOYMENT, SHORT, &format!("{operators} operators to be ready"), ready).await?;
    Ok(())
}

fn pods(cluster: &Cluster) -> Api<Pod> {
    Api::namespaced(cluster.client.clone(), SYSTEM)
}
