//! A server's pod is gone while no node takes pods: the trainers wait for it.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_api::training::ConsistencyMode;
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::namespace::{TestNamespace, phase_of};
use psjobs_e2e::nodes;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

const SERVER: &str = "mnist-ps-0";
/// How long no node takes pods: longer than processes that are not started again wait for each other (2 minutes).
const CORDONED: Duration = Duration::from_secs(150);

/// Deletes server 0's pod while all nodes are cordoned. No trainer's waiting may count as the job's failure, and the job
/// must succeed when nodes take pods again.
pub async fn job_waits_for_a_node(namespace: &TestNamespace) -> Result<()> {
    let mut job = training(&["train", "mnist", "--max-steps", "400"])?;
    job.spec.training.consistency.mode = ConsistencyMode::Sync;
    job.spec.trainer.replicas = 4;
    namespace.apply(&job).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    line(&namespace.pods(), "mnist-trainer-3", &["training", "step="], TRAINING).await?;

    let all: Api<Node> = Api::all(namespace.cluster.client.clone());
    let all = all.list(&ListParams::default()).await?.items;
    // Nodes that took no pods before are left as they are.
    let open = all.iter().filter(|node| !node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false));
    let open: Vec<String> = open.map(ResourceExt::name_any).collect();
    let waited = async {
        for node in &open {
            nodes::take_pods(&namespace.cluster, node, false).await?;
        }
        waits(namespace).await
    };
    let waited = waited.await;
    for node in &open {
        nodes::take_pods(&namespace.cluster, node, true).await?;
    }
    waited?;

    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    namespace.print(format_args!("no node took pods for {} s; {} replaced", CORDONED.as_secs(), status.restarts));
    ensure!(status.restarts_counted == 0, "{} restarts were counted", status.restarts_counted);
    Ok(())
}

/// Deletes the server's pod, and watches the job for as long as its successor finds no node.
async fn waits(namespace: &TestNamespace) -> Result<()> {
    let before = namespace.pods().get(SERVER).await?.uid();
    namespace.pods().delete(SERVER, &DeleteParams::default().grace_period(0)).await?;
    let pending = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.uid() != before && phase_of(pod) == Some("Pending"));
    until(&namespace.pods(), SERVER, SHORT, &format!("a successor of {SERVER} to wait for a node"), pending).await?;
    let phase = |job: Option<&ParameterServerJob>| job.and_then(|job| job.status.as_ref()?.phase);
    let ended = |job: Option<&ParameterServerJob>| phase(job).is_none_or(Phase::is_final);
    let watched = until(&namespace.jobs(), "mnist", CORDONED, "the job to end, which it must not", ended).await;
    if let Ok(job) = watched {
        let conditions = job.and_then(|job| job.status).context("the job is gone")?.conditions;
        let reasons: Vec<_> = conditions.iter().map(|one| format!("{}: {}", one.reason, one.message)).collect();
        bail!("the job has ended while no node took pods: {}", reasons.join("; "));
    }
    // The successor has waited all the time.
    let pod = namespace.pods().get(SERVER).await?;
    ensure!(phase_of(&pod) == Some("Pending"), "{SERVER} has found a node though none takes pods");
    Ok(())
}
