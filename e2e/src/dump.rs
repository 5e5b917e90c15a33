//! What one needs to see when a test has failed: jobs, pods, events, logs.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::cluster::SYSTEM;
use crate::site::Site;

/// Log lines of each pod.
const TAIL: &str = "--tail=60";

/// Prints it to standard error.
pub async fn dump(site: &Site) {
    show(site, &["get", "psjobs,pods,services", "--output", "wide"]).await;
    show(site, &["get", "psjobs", "--output", "yaml"]).await;
    show(site, &["get", "events", "--sort-by", ".metadata.creationTimestamp"]).await;
    let pods: Vec<Pod> = site.pods().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
    for pod in pods {
        show(site, &["logs", TAIL, "--all-containers", "--ignore-errors", &pod.name_any()]).await;
    }
    show(site, &["--namespace", SYSTEM, "logs", TAIL, "--selector", "app.kubernetes.io/instance=psjobs"]).await;
}

async fn show(site: &Site, arguments: &[&str]) {
    let said = site.kubectl(arguments).await.unwrap_or_else(|error| format!("{error:#}\n"));
    eprintln!("---- {}: kubectl {}\n{said}", site.namespace, arguments.join(" "));
}
