//! The operator's pods: which one leads, and its death.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};

use crate::cluster::{Cluster, SYSTEM};
use crate::command::run;
use crate::site::phase_of;
use crate::wait::{SHORT, until};

/// The lease, and the chart's Deployment under the release's name.
const LEASE: &str = "psjobs-operator";
const DEPLOYMENT: &str = "psjobs";

/// Names of the operator's pods that run.
///
/// # Errors
/// If the cluster does not answer.
pub async fn running(cluster: &Cluster) -> Result<Vec<String>> {
    let ours = ListParams::default().labels("app.kubernetes.io/instance=psjobs,app.kubernetes.io/component=operator");
    let mut pods = pods(cluster).list(&ours).await?.items;
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none() && phase_of(pod) == Some("Running"));
    Ok(pods.iter().map(ResourceExt::name_any).collect())
}

/// The node that an operator's pod is on.
///
/// # Errors
/// If it is on none.
pub async fn node_of(cluster: &Cluster, pod: &str) -> Result<String> {
    let node = pods(cluster).get(pod).await?.spec.and_then(|spec| spec.node_name);
    node.with_context(|| format!("{pod} is on no node"))
}

/// Who leads, as soon as it is somebody for whom `is` holds.
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

/// Kills an operator by a signal that it cannot hear, in a cluster of kind; its pod goes too, as the kubelet would start
/// a process that crashes again and again later and later.
///
/// # Errors
/// If there is no such process.
pub async fn kill(cluster: &Cluster, pod: &str) -> Result<()> {
    let node = node_of(cluster, pod).await?;
    let container = format!("$(crictl ps --quiet --label io.kubernetes.pod.name={pod})");
    let process = format!("$(crictl inspect --output go-template --template '{{{{.info.pid}}}}' {container})");
    run("docker", &["exec", &node, "sh", "-c", &format!("kill -KILL {process}")]).await?;
    match pods(cluster).delete(pod, &DeleteParams::default().grace_period(0)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => bail!(error),
    }
}

/// Runs so many operators, and waits until they are ready.
///
/// # Errors
/// If they are not soon.
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
