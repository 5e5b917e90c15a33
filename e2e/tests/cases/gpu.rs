//! Two trainers request a GPU each, and the cluster has none, then one, then two. The GPU is an extended resource
//! that the test adds to a node; nothing uses it. In a gang no pod starts before there are two.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, Patch, PatchParams};
use psjobs_api::Role;
use psjobs_api::crd::{ConditionType, ParameterServerJob, Phase, SchedulingBackend, SchedulingPolicy};
use psjobs_api::training::ConsistencyMode;
use psjobs_e2e::manifest::training;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::nodes;
use psjobs_e2e::wait::{SHORT, TRAINING, until};
use serde_json::{Value, json};

/// Domain of the resources; each test has one of its own, because nodes are shared by all tests.
const DOMAIN: &str = "e2e.psjobs.dev";

pub async fn trainers_wait(namespace: &TestNamespace) -> Result<()> {
    namespace.apply(&job(namespace)?).await?;
    waits(namespace, 0).await?;
    let shown = namespace.kubectl(&["get", "psjobs", "--output", "wide"]).await?;
    println!("{shown}");
    ensure!(shown.contains("Unschedulable"), "{shown}");

    let server = namespace.pods_of("mnist", Role::Server).await?.pop().context("the server's pod")?;
    let node = server.spec.and_then(|spec| spec.node_name).context("the server has a node")?;
    with_gpus(namespace, &node, async {
        set_gpus(namespace, &node, json!("1")).await?;
        waits(namespace, 1).await?;
        set_gpus(namespace, &node, json!("2")).await?;
        namespace.phase("mnist", Phase::Succeeded, TRAINING).await.map(drop)
    })
    .await
}

pub async fn gang_waits(namespace: &TestNamespace) -> Result<()> {
    let mut job = job(namespace)?;
    let workload = SchedulingPolicy { backend: Some(SchedulingBackend::Workload), ..SchedulingPolicy::default() };
    job.spec.scheduling_policy = Some(workload);
    let node = match nodes::workers(&namespace.cluster).await?.pop() {
        Some(worker) => worker,
        None => nodes::control_plane(&namespace.cluster).await?,
    };
    with_gpus(namespace, &node, async {
        set_gpus(namespace, &node, json!("1")).await?;
        namespace.apply(&job).await?;
        waits(namespace, 0).await?;
        let shown = namespace.kubectl(&["get", "psjobs,pods", "--output", "wide"]).await?;
        println!("{shown}");
        let pods = namespace.pods().list(&ListParams::default()).await?.items;
        let bound = pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
        ensure!((pods.len(), bound.count()) == (3, 0), "all pods are there and none has a node:\n{shown}");
        set_gpus(namespace, &node, json!("2")).await?;
        namespace.phase("mnist", Phase::Running, SHORT).await?;
        let restarts = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?.restarts;
        ensure!(restarts == 0, "waiting is no failure: {restarts} restarts");
        Ok(())
    })
    .await
}

/// Returns the name of the namespace's extended resource.
fn resource(namespace: &TestNamespace) -> String {
    format!("{DOMAIN}/{}", namespace.name)
}

fn job(namespace: &TestNamespace) -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mlp", "--device", "cpu", "--max-steps", "300"])?;
    // Sync, so that the first trainer with a GPU does not finish alone and leave its GPU to the second.
    job.spec.training.consistency.mode = ConsistencyMode::Sync;
    job.spec.trainer.gpus = 1;
    job.spec.trainer.gpu_resource_name = resource(namespace);
    Ok(job)
}

/// Waits until the status reports that a trainer lacks a GPU while `ready` others run; the scheduler decides which.
async fn waits(namespace: &TestNamespace, ready: i32) -> Result<()> {
    let resource = resource(namespace);
    let reported = |job: Option<&ParameterServerJob>| {
        let Some(status) = job.and_then(|job| job.status.as_ref()) else { return false };
        let running = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Running);
        let waits = running
            .is_some_and(|running| running.message.starts_with("trainer") && running.message.contains(&resource));
        waits && status.trainer.as_ref().is_some_and(|trainers| trainers.ready == ready)
    };
    until(
        &namespace.jobs(),
        "mnist",
        SHORT,
        &format!("a trainer to wait for a GPU beside {ready} that have one"),
        reported,
    )
    .await?;
    Ok(())
}

/// Runs a test that adds GPUs to the node, and removes them whatever happens.
async fn with_gpus(namespace: &TestNamespace, node: &str, test: impl Future<Output = Result<()>>) -> Result<()> {
    let result = test.await;
    set_gpus(namespace, node, Value::Null).await?;
    result
}

async fn set_gpus(namespace: &TestNamespace, node: &str, gpus: Value) -> Result<()> {
    let nodes: Api<Node> = Api::all(namespace.cluster.client.clone());
    let resource = resource(namespace);
    let status = json!({"status": {"capacity": {&resource: gpus}, "allocatable": {&resource: gpus}}});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
