//! Keeps what the pods of a soak log and how their containers end, in a file for each pod: a pod that is replaced takes
//! its log along.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use futures::{AsyncBufReadExt, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use kube::api::{Api, LogParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use psjobs_api::crd::names;
use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;

use crate::namespace::phase_of;

/// Writes the logs of all jobs' pods to files in `folder`, until it is dropped.
///
/// # Errors
/// If the folder cannot be made.
pub async fn keep_logs(client: Client, folder: &Path) -> Result<()> {
    tokio::fs::create_dir_all(folder).await.with_context(|| format!("cannot make {}", folder.display()))?;
    let of_jobs = watcher::Config::default().labels(names::LABEL_JOB);
    let mut pods = pin!(watcher(Api::<Pod>::all(client.clone()), of_jobs).default_backoff().applied_objects());
    let (followed, mut followers) = (Arc::new(Mutex::new(HashSet::new())), JoinSet::new());
    let mut ended = HashSet::new();
    while let Some(event) = pods.next().await {
        // An API server that is away is asked again by the watch.
        let Ok(pod) = event else { continue };
        let Some(uid) = pod.uid() else { continue };
        let file = file_of(folder, &pod, &uid);
        if let Some(end) = terminated(&pod)
            && ended.insert(uid.clone())
        {
            append(&file, &sentence(end)).await?;
        }
        let starts = phase_of(&pod) != Some("Pending");
        if starts && followed.lock().unwrap_or_else(PoisonError::into_inner).insert(uid.clone()) {
            let (client, followed) = (client.clone(), followed.clone());
            followers.spawn(async move {
                if follow(client, &pod, &file).await.is_err() {
                    // The next change of the pod begins it again.
                    followed.lock().unwrap_or_else(PoisonError::into_inner).remove(&uid);
                }
            });
        }
    }
    Ok(())
}

fn file_of(folder: &Path, pod: &Pod, uid: &str) -> PathBuf {
    let incarnation = pod.annotations().get(names::ANNOTATION_INCARNATION).map_or("", String::as_str);
    folder.join(format!("{}.{incarnation}.{}.log", pod.name_any(), uid.get(..8).unwrap_or(uid)))
}

fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let first = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    first.state.as_ref()?.terminated.as_ref()
}

fn sentence(end: &ContainerStateTerminated) -> String {
    let reason = end.reason.as_deref().unwrap_or_default();
    let message = end.message.as_deref().unwrap_or_default();
    // A process that did not end by itself has its log as its message.
    let message = if reason == "Error" { "" } else { message };
    format!("---- ended with exit code {}, {reason}: {message}\n", end.exit_code)
}

async fn follow(client: Client, pod: &Pod, file: &Path) -> Result<()> {
    let pods = Api::<Pod>::namespaced(client, &pod.namespace().context("a pod has a namespace")?);
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    append(file, &format!("---- on {node}, from the beginning\n")).await?;
    let parameters = LogParams { follow: true, ..LogParams::default() };
    let mut lines = pods.log_stream(&pod.name_any(), &parameters).await?.lines();
    while let Some(line) = lines.try_next().await? {
        append(file, &format!("{line}\n")).await?;
    }
    Ok(())
}

async fn append(file: &Path, text: &str) -> Result<()> {
    let mut file: File = OpenOptions::new().create(true).append(true).open(file).await?;
    file.write_all(text.as_bytes()).await?;
    file.flush().await?;
    Ok(())
}
