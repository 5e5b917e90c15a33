//! Lines as they are said, by pods that come and go, until the job ends.

use std::collections::HashSet;
use std::pin::pin;
use std::time::Instant;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use psjobs_api::Role;
use psjobs_api::crd::Phase;

use super::filter::Filter;
use super::merge::Merge;
use super::reader::{Line, Outlet, Reader, State, Wanted, state};
use super::{HOLD, Out, take};
use crate::connection::Cluster;
use crate::programs::programs;
use crate::text;

/// The pods that are read.
struct Readers<'a> {
    filter: &'a Filter,
    pods: &'a Api<Pod>,
    outlet: Outlet,
    /// By uid, as pods have their predecessors' names, and role.
    known: HashSet<(String, Role)>,
    merge: Merge<Line>,
}

impl Readers<'_> {
    /// Reads the programs of a pod that have started, unless they are read already.
    fn start(&mut self, pod: Pod, wanted: &Wanted, out: &mut Out) {
        programs(pod).iter().for_each(|program| self.start_program(program, wanted, out));
    }

    fn start_program(&mut self, pod: &Pod, wanted: &Wanted, out: &mut Out) {
        let Some(replica) = self.filter.accepts(pod) else { return };
        let Some(key) = pod.metadata.uid.clone().map(|uid| (uid, replica.role)) else { return };
        if state(pod) == State::Waits || self.known.contains(&key) {
            return;
        }
        let source = self.known.len();
        self.known.insert(key);
        self.merge.open(source);
        out.name(source, replica);
        tokio::spawn(Reader::new(source, pod, self.pods.clone(), wanted.clone(), &self.outlet).run());
    }
}

/// Prints the lines of the job's pods until it has ended, or whoever reads has gone away.
pub async fn follow(
    cluster: &Cluster,
    name: &str,
    filter: &Filter,
    pods: &Api<Pod>,
    wanted: &Wanted,
    out: &mut Out,
) -> anyhow::Result<u8> {
    let selector = filter.selector(name);
    let mut pod_events = pin!(watcher(pods.clone(), Config::default().labels(&selector)).default_backoff());
    let only = Config::default().fields(&format!("metadata.name={name}"));
    let mut job_events = pin!(watcher(cluster.jobs(), only).default_backoff());
    let (outlet, mut receiver) = Outlet::channel(true);
    let mut readers = Readers { filter, pods, outlet, known: HashSet::new(), merge: Merge::new(Some(HOLD)) };
    // Pods that come later are read from their beginning.
    let later = Wanted { follow: true, ..Wanted::default() };
    let mut first_listing = true;
    let mut over = false;
    loop {
        let due = readers.merge.due().map(tokio::time::Instant::from_std);
        tokio::select! {
            Some(message) = receiver.recv() => {
                take(message, &mut readers.merge);
                while let Ok(message) = receiver.try_recv() {
                    take(message, &mut readers.merge);
                }
            }
            Some(event) = pod_events.next() => match event {
                Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                    readers.start(pod, if first_listing { wanted } else { &later }, out);
                }
                Ok(Event::InitDone) => first_listing = false,
                Ok(Event::Init | Event::Delete(_)) => {}
                Err(error) => eprintln!("the cluster does not answer ({error}); trying again"),
            },
            Some(event) = job_events.next() => match event {
                Ok(Event::Apply(job) | Event::InitApply(job)) => {
                    over = text::phase(&job).is_some_and(Phase::is_final);
                }
                Ok(Event::Delete(_)) => over = true,
                Ok(Event::Init | Event::InitDone) | Err(_) => {}
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(tokio::time::Instant::now)), if due.is_some() => {}
        }
        while let Some(line) = readers.merge.next(Instant::now()) {
            if !out.line(&line) {
                return Ok(0);
            }
        }
        if !out.flush() {
            return Ok(0);
        }
        if over && readers.merge.is_over() {
            // A pod may have come and ended without an event having arrived here.
            let listed = pods.list(&ListParams::default().labels(&selector)).await;
            let listed = listed.map_err(|error| cluster.explain(error, name))?;
            listed
                .items
                .into_iter()
                .for_each(|pod| readers.start(pod, if first_listing { wanted } else { &later }, out));
            if readers.merge.is_over() {
                return Ok(0);
            }
        }
    }
}
