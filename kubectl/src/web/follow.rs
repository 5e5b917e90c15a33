//! Watches the jobs of a cluster, their pods and their events.

use std::pin::pin;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};
use psjobs_api::crd::names::LABEL_JOB;
use psjobs_api::crd::{KIND, ParameterServerJob};
use tokio::time::MissedTickBehavior;

use super::jobs::Jobs;

/// Changes of this time are shown together.
const PERIOD: Duration = Duration::from_millis(500);
/// Objects of one answer: what is decoded at once is many times what is kept of it.
const PAGE: u32 = 250;

/// The jobs that are watched.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// `None` is all namespaces.
    pub namespace: Option<String>,
    /// `None` is all jobs.
    pub name: Option<String>,
}

impl Scope {
    fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        match &self.namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        }
    }
}

/// Watches for ever, and calls `show` twice a second with what has been seen.
pub async fn follow(client: &Client, scope: &Scope, mut show: impl FnMut(&mut Jobs)) {
    let (one, of_one, about_one) = match &scope.name {
        Some(name) => (format!("metadata.name={name}"), format!("={name}"), format!(",involvedObject.name={name}")),
        None => Default::default(),
    };
    let all = Config::default().page_size(PAGE);
    let jobs = watcher(scope.api::<ParameterServerJob>(client), all.clone().fields(&one)).default_backoff();
    let labels = format!("{LABEL_JOB}{of_one}");
    let pods = watcher(scope.api::<Pod>(client), all.clone().labels(&labels)).default_backoff();
    let about = format!("involvedObject.kind={KIND}{about_one}");
    let events = watcher(scope.api::<Event>(client), all.fields(&about)).default_backoff();
    let (mut jobs, mut pods, mut events) = (pin!(jobs), pin!(pods), pin!(events));
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = Jobs::default();
    loop {
        tokio::select! {
            Some(seen) = jobs.next() => match seen {
                Ok(event) => known.see_job(event),
                Err(error) => known.fails(0, error.to_string()),
            },
            Some(seen) = pods.next() => match seen {
                Ok(event) => known.see_pod(event),
                Err(error) => known.fails(1, error.to_string()),
            },
            Some(seen) = events.next() => match seen {
                Ok(event) => known.see_event(event),
                Err(error) => known.fails(2, error.to_string()),
            },
            _ = ticks.tick() => show(&mut known),
        }
    }
}
