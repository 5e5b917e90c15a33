//! The objects of the API server, as JSON.

use std::net::SocketAddr;

use psjobs_api::Role;
use psjobs_api::crd::names::{self, LABEL_INDEX, LABEL_JOB, LABEL_ROLE};
use psjobs_api::crd::{GROUP, KIND, VERSION};
use serde_json::{Value, json};

/// Name of the job.
pub const JOB: &str = "bench";
pub const JOBS: &str = "/apis/psjobs.dev/v1alpha1/namespaces/default/parameterserverjobs";
pub const PODS_PATH: &str = "/api/v1/namespaces/default/pods";

/// The path of a pod's log.
pub fn log_path(index: usize) -> String {
    format!("{PODS_PATH}/{}/log", pod_name(index))
}

fn pod_name(index: usize) -> String {
    names::pod(JOB, Role::Trainer, index as u32)
}

/// The job, which runs or has succeeded.
pub fn job(over: bool) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": KIND,
        "metadata": {"name": JOB, "namespace": "default", "uid": "job", "resourceVersion": if over { "2" } else { "1" }},
        "spec": {"trainer": {"template": {"spec": {"containers": []}}}},
        "status": {"phase": if over { "Succeeded" } else { "Running" }},
    })
}

/// A pod of the job, which runs or has succeeded.
pub fn pod(index: usize, over: bool) -> Value {
    let state = if over { json!({"terminated": {"exitCode": 0}}) } else { json!({"running": {}}) };
    let container = json!({
        "name": "trainer", "image": "", "imageID": "", "ready": !over, "restartCount": 0, "state": state,
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(index),
            "namespace": "default",
            "uid": format!("pod-{index}"),
            "resourceVersion": "1",
            "labels": {LABEL_JOB: JOB, LABEL_ROLE: Role::Trainer.to_string(), LABEL_INDEX: index.to_string()},
        },
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": if over { "Succeeded" } else { "Running" }, "containerStatuses": [container]},
    })
}

/// A list of objects of a kind.
pub fn list(kind: &str, items: &[Value]) -> Value {
    let group = if kind == KIND { format!("{GROUP}/{VERSION}") } else { "v1".to_owned() };
    json!({"apiVersion": group, "kind": format!("{kind}List"), "metadata": {"resourceVersion": "1"}, "items": items})
}

/// A kubeconfig, whose YAML is JSON.
pub fn kubeconfig(address: SocketAddr) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": JOB,
        "contexts": [{"name": JOB, "context": {"cluster": JOB, "user": JOB, "namespace": "default"}}],
        "clusters": [{"name": JOB, "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": JOB, "user": {}}],
    })
}
