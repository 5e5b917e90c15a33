//! Prints the jobs, pods, events and logs of a test that has failed.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::cluster::SYSTEM;
use crate::namespace::TestNamespace;

/// How many log lines of each pod are printed.
const TAIL: &str = "--tail=60";

/// Prints the state of the namespace and the operator's log to standard error.
pub async fn dump(namespace: &TestNamespace) {
    show(namespace, &["get", "psjobs,pods,services", "--output", "wide"]).await;
    show(namespace, &["get", "psjobs", "--output", "yaml"]).await;
    show(namespace, &["get", "events", "--sort-by", ".metadata.creationTimestamp"]).await;
    let pods: Vec<Pod> = namespace.pods().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
    for pod in pods {
        show(namespace, &["logs", TAIL, "--all-containers", "--ignore-errors", &pod.name_any()]).await;
    }
    show(namespace, &["--namespace", SYSTEM, "logs", TAIL, "--selector", "app.kubernetes.io/instance=psjobs"]).await;
}

async fn show(namespace: &TestNamespace, arguments: &[&str]) {
    let said = namespace.kubectl(arguments).await.unwrap_or_else(|error| format!("{error:#}\n"));
    eprintln!("---- {}: kubectl {}\n{said}", namespace.name, arguments.join(" "));
}
