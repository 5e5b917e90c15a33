//! Two trainers want a GPU each, and the cluster has none, then one, then two. The GPU is a resource that the test
//! gives to a node; nothing uses it. In a gang nobody starts before there are two.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, Patch, PatchParams};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, ParameterServerJob, Phase, SchedulingBackend, SchedulingPolicy};
use psjobs_api::training::ConsistencyMode;
use psjobs_e2e::manifest::training;
use psjobs_e2e::nodes;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until};
use serde_json::{Value, json};

const RESOURCE: &str = "e2e.psjobs.dev/gpu";

pub async fn is_waited_for(site: &Site) -> Result<()> {
    site.apply(&job()?).await?;
    waits(site, 0).await?;
    let told = site.kubectl(&["get", "psjobs", "--output", "wide"]).await?;
    println!("{told}");
    ensure!(told.contains("Unschedulable"), "{told}");

    let server = site.pods_of("mnist", Role::Server).await?.pop().context("the server's pod")?;
    let node = server.spec.and_then(|spec| spec.node_name).context("the server has a node")?;
    lend(site, &node, async {
        give(site, &node, json!("1")).await?;
        waits(site, 1).await?;
        give(site, &node, json!("2")).await?;
        site.phase("mnist", Phase::Succeeded, TRAINING).await.map(drop)
    })
    .await
}

pub async fn is_waited_for_by_all(site: &Site) -> Result<()> {
    let mut job = job()?;
    let workload = SchedulingPolicy { backend: Some(SchedulingBackend::Workload), ..SchedulingPolicy::default() };
    job.spec.scheduling_policy = Some(workload);
    let node = match nodes::workers(&site.cluster).await?.pop() {
        Some(worker) => worker,
        None => nodes::control_plane(&site.cluster).await?,
    };
    lend(site, &node, async {
        give(site, &node, json!("1")).await?;
        site.apply(&job).await?;
        waits(site, 0).await?;
        let told = site.kubectl(&["get", "psjobs,pods", "--output", "wide"]).await?;
        println!("{told}");
        let pods = site.pods().list(&ListParams::default()).await?.items;
        let bound = pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
        ensure!((pods.len(), bound.count()) == (3, 0), "all pods are there and none has a node:\n{told}");
        give(site, &node, json!("2")).await?;
        site.phase("mnist", Phase::Running, SHORT).await?;
        let restarts = site.phase("mnist", Phase::Succeeded, TRAINING).await?.restarts;
        ensure!(restarts == 0, "waiting is no failure: {restarts} restarts");
        Ok(())
    })
    .await
}

fn job() -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mlp", "--max-steps", "300"])?;
    // In step, so that the first trainer with a GPU does not finish alone and hand it on.
    job.spec.training.consistency.mode = ConsistencyMode::Sync;
    job.spec.trainer.gpus = 1;
    job.spec.trainer.gpu_resource_name = RESOURCE.into();
    Ok(job)
}

/// Until the job says that a trainer finds no GPU while `ready` others have one: which ones the scheduler decides.
async fn waits(site: &Site, ready: i32) -> Result<()> {
    let told = |job: Option<&ParameterServerJob>| {
        let Some(status) = job.and_then(|job| job.status.as_ref()) else { return false };
        let running = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Running);
        let said =
            running.is_some_and(|running| running.message.starts_with("trainer") && running.message.contains(RESOURCE));
        said && status.trainer.as_ref().is_some_and(|trainers| trainers.ready == ready)
    };
    until(&site.jobs(), "mnist", SHORT, &format!("a trainer to wait for a GPU beside {ready} that have one"), told)
        .await?;
    Ok(())
}

/// Tells a story in which the node gets GPUs, and takes them back whatever happens.
async fn lend(site: &Site, node: &str, story: impl Future<Output = Result<()>>) -> Result<()> {
    let told = story.await;
    give(site, node, Value::Null).await?;
    told
}

async fn give(site: &Site, node: &str, gpus: Value) -> Result<()> {
    let nodes: Api<Node> = Api::all(site.cluster.client.clone());
    let status = json!({"status": {"capacity": {RESOURCE: gpus}, "allocatable": {RESOURCE: gpus}}});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
