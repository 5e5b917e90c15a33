//! When things happened: watches that note the time of every change they are asked for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, Phase};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::DEADLINE;

/// A change of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    PodCreated(String),
    PodDeleted(String),
    Phase(String, Phase),
    /// So many of a job's trainers are done, as its status says.
    Done(String, i32),
}

/// First times of changes in one namespace, from now on.
pub struct Journal {
    times: Arc<Mutex<HashMap<Change, Instant>>>,
    count: watch::Receiver<usize>,
    tasks: Vec<JoinHandle<()>>,
}

impl Journal {
    pub fn of(client: &Client, namespace: &str) -> Self {
        Self::new(client, namespace, true)
    }

    /// Without a watch of pods, which costs the API server a share of each change of theirs.
    pub fn of_jobs(client: &Client, namespace: &str) -> Self {
        Self::new(client, namespace, false)
    }

    fn new(client: &Client, namespace: &str, pods_too: bool) -> Self {
        let times = Arc::new(Mutex::new(HashMap::new()));
        let (counter, count) = watch::channel(0);
        let note = {
            let times = times.clone();
            move |change: Change| {
                let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
                times.entry(change).or_insert_with(Instant::now);
                counter.send_replace(times.len());
            }
        };
        let pods = Api::<PartialObjectMeta<Pod>>::namespaced(client.clone(), namespace);
        let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), namespace);
        let mut tasks = vec![tokio::spawn(watch_jobs(jobs, note.clone()))];
        if pods_too {
            tasks.push(tokio::spawn(watch_pods(pods, note)));
        }
        Self { times, count, tasks }
    }

    /// Waits until all of these have happened, and returns when.
    pub async fn all(&mut self, changes: &[Change]) -> Result<Vec<Instant>> {
        let times = self.times.clone();
        let happened = move || {
            let times = times.lock().unwrap_or_else(PoisonError::into_inner);
            changes.iter().map(|change| times.get(change).copied()).collect::<Option<Vec<_>>>()
        };
        let waiting = async {
            loop {
                if let Some(times) = happened() {
                    return times;
                }
                if self.count.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let waited = tokio::time::timeout(DEADLINE, waiting).await;
        waited
            .with_context(|| format!("not all of {} changes happened, for example {:?}", changes.len(), changes.last()))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn watch_pods(pods: Api<PartialObjectMeta<Pod>>, note: impl Fn(Change)) {
    let events = watcher(pods, watcher::Config::default()).default_backoff();
    let note = |event: Event<PartialObjectMeta<Pod>>| match event {
        Event::Apply(pod) | Event::InitApply(pod) => note(Change::PodCreated(pod.name_any())),
        Event::Delete(pod) => note(Change::PodDeleted(pod.name_any())),
        Event::Init | Event::InitDone => {}
    };
    events.for_each(async |event| event.map_or_else(begins_anew, note)).await;
}

async fn watch_jobs(jobs: Api<ParameterServerJob>, note: impl Fn(Change)) {
    let events = watcher(jobs, watcher::Config::default()).default_backoff();
    let note = |event: Event<ParameterServerJob>| {
        let (Event::Apply(job) | Event::InitApply(job)) = event else { return };
        let Some(status) = &job.status else { return };
        if let Some(phase) = status.phase {
            note(Change::Phase(job.name_any(), phase));
        }
        if let Some(trainers) = &status.trainer {
            note(Change::Done(job.name_any(), trainers.succeeded));
        }
    };
    events.for_each(async |event| event.map_or_else(begins_anew, note)).await;
}

fn begins_anew(error: watcher::Error) {
    eprintln!("a watch of the benchmark broke, and begins anew: {error}");
}
