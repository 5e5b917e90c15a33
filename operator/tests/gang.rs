//! Kubernetes' own scheduler, and a node that no kubelet runs.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use psjobs_api::crd::{ConditionType, ParameterServerJobStatus};
use serde_json::json;
use support::{ApiServer, Team, gang_scheduling, install_definition};

const NODE: &str = "only";

#[tokio::test]
async fn the_pods_of_a_gang_find_nodes_all_at_once_or_not_at_all() {
    let Some(flags) = gang_scheduling() else {
        return eprintln!("SKIPPED: this test needs the programs of Kubernetes 1.37 or newer");
    };
    let Some(server) = ApiServer::start_with(&flags, Some(&flags[..1])).await else { return };
    install_definition(&server.client()).await;
    add_node(&server.client()).await;
    make_room(&server.client(), 2).await;
    let team = Team::on(&server, "gang").await;
    let _operator = team.operator();
    team.apply("schedulingPolicy: {backend: Workload}").await;

    let waiting = team.status(|status| running(status).contains("cannot start: 0/1 nodes")).await;
    assert!(running(&waiting).contains("Too many pods"), "{}", running(&waiting));
    assert_eq!(waiting.reason.as_deref(), Some("Unschedulable"));
    assert_eq!(team.pods().await.len(), 3);
    assert_eq!(bound(&team).await, [""; 0], "there is room for two of three");

    make_room(&server.client(), 3).await;
    for pod in ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"] {
        let is_bound = |pod: Option<&Pod>| pod.and_then(|pod| pod.spec.as_ref()?.node_name.as_deref()) == Some(NODE);
        team.until(pod, is_bound).await;
    }
    team.run_all().await;
}

fn running(status: &ParameterServerJobStatus) -> &str {
    let running = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Running);
    running.map_or("", |running| &running.message)
}

/// Pods that have a node.
async fn bound(team: &Team) -> Vec<String> {
    let pods = team.api::<Pod>().list(&ListParams::default()).await.expect("pods can be listed");
    let bound = pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
    bound.map(|pod| pod.name_any()).collect()
}

async fn add_node(client: &Client) {
    let nodes = Api::<Node>::all(client.clone());
    let node = serde_json::from_value(json!({"metadata": {"name": NODE}})).expect("a node");
    nodes.create(&PostParams::default(), &node).await.expect("a node can be made");
    // The API server taints each new node until a controller finds it ready; here is none.
    let ready = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes.patch(NODE, &PatchParams::default(), &ready).await.expect("the node can be changed");
}

async fn make_room(client: &Client, pods: u32) {
    let room = json!({"cpu": "64", "memory": "256Gi", "pods": pods.to_string()});
    let ready = json!([{"type": "Ready", "status": "True"}]);
    let status = Patch::Merge(json!({"status": {"capacity": room, "allocatable": room, "conditions": ready}}));
    let nodes = Api::<Node>::all(client.clone());
    nodes.patch_status(NODE, &PatchParams::default(), &status).await.expect("the node's status can be changed");
}
