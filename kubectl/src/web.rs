//! `kubectl psjob web`: the page of the jobs of a namespace, served on this machine.

pub(crate) mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{ListParams, LogParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{Store, reflector, store};
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, ResourceExt as _};
use psjobs::BadInput;
use psjobs_api::crd::names::LABEL_JOB;
use psjobs_api::crd::{KIND, ParameterServerJob};
use psjobs_web::{Board, Door, Logs, Site};
use tokio::time::MissedTickBehavior;

use self::page::{Histories, Seen};
use crate::connection::{Cluster, ConnectionArgs, Flags};

/// Changes of this time are shown together.
const PERIOD: Duration = Duration::from_millis(500);
/// Periods after which jobs are shown again though nothing has changed: what is said of a job depends on how long it waits.
const IDLE: u32 = 10;
/// Lines at the end of a log that the page shows.
const TAIL: i64 = 500;

/// Show jobs in a web page: curves, pods, events, and what to do
///
/// Serves the page on this machine until Ctrl-C, with your own rights in the cluster. It changes nothing.
#[derive(Debug, Args)]
pub struct WebArgs {
    /// Name of the job; by default all jobs of the namespace
    name: Option<String>,
    /// Address to serve at, as 127.0.0.1:9000; by default the first free port of this machine from 8090 on
    #[arg(long, value_name = "ADDRESS:PORT")]
    address: Option<SocketAddr>,
}

impl WebArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        // A wrong name and a cluster without psjobs are errors here, and not an empty page.
        match &self.name {
            Some(name) => drop(cluster.job(name).await?),
            None => {
                let one = ListParams::default().limit(1);
                cluster.jobs().list(&one).await.map_err(|error| cluster.explain(error, "\0"))?;
            }
        }
        let door = Door::open(self.address).map_err(|error| BadInput::new(error.to_string()))?;
        eprintln!("open {}; Ctrl-C ends the page and leaves the jobs alone", door.address);
        let (listener, token) = door.into_parts()?;
        let board = Arc::new(Board::default());
        let logs = Arc::new(PodLogs { pods: pods(&cluster) });
        let flags = connection.as_flags();
        let serving = psjobs_web::serve(listener, Site { board: board.clone(), logs, token });
        tokio::select! {
            served = serving => served.context("the page cannot be served any more")?,
            () = follow(&cluster, self.name.as_deref(), &board, &flags) => {}
            pressed = tokio::signal::ctrl_c() => pressed?,
        }
        Ok(0)
    }
}

fn pods(cluster: &Cluster) -> Api<Pod> {
    Api::namespaced(cluster.client.clone(), &cluster.namespace)
}

/// Writes what the cluster says to `board`, for ever.
async fn follow(cluster: &Cluster, name: Option<&str>, board: &Board, flags: &Flags) {
    let (one, of_one, about_one) = match name {
        Some(name) => (format!("metadata.name={name}"), format!("={name}"), format!(",involvedObject.name={name}")),
        None => Default::default(),
    };
    let (jobs, writer) = store::<ParameterServerJob>();
    let job_changes = reflector(writer, watcher(cluster.jobs(), Config::default().fields(&one)).default_backoff());
    let (all_pods, writer) = store::<Pod>();
    let labels = format!("{LABEL_JOB}{of_one}");
    let pod_changes = reflector(writer, watcher(pods(cluster), Config::default().labels(&labels)).default_backoff());
    let (events, writer) = store::<Event>();
    let about = format!("involvedObject.kind={KIND}{about_one}");
    let all_events = Api::<Event>::namespaced(cluster.client.clone(), &cluster.namespace);
    let event_changes = reflector(writer, watcher(all_events, Config::default().fields(&about)).default_backoff());
    let (mut job_changes, mut pod_changes, mut event_changes) =
        (pin!(job_changes), pin!(pod_changes), pin!(event_changes));
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut histories = Histories::default();
    // The last error of each watch; the watch begins again by itself.
    let mut troubles: [Option<String>; 3] = Default::default();
    let (mut is_changed, mut idle) = (true, 0);
    loop {
        // The stores have what is new.
        let (watch, error) = tokio::select! {
            Some(seen) = job_changes.next() => (0, seen.err()),
            Some(seen) = pod_changes.next() => (1, seen.err()),
            Some(seen) = event_changes.next() => (2, seen.err()),
            _ = ticks.tick() => {
                idle += 1;
                if is_changed || idle >= IDLE {
                    let trouble = troubles.iter().flatten().next().map(String::as_str);
                    show(&jobs, &all_pods, &events, &mut histories, board, (flags, trouble));
                    (is_changed, idle) = (false, 0);
                }
                continue;
            }
        };
        troubles[watch] = error.map(|error| error.to_string());
        is_changed = true;
    }
}

/// Writes all jobs to the board, and removes those that are gone.
fn show(
    jobs: &Store<ParameterServerJob>,
    pods: &Store<Pod>,
    events: &Store<Event>,
    histories: &mut Histories,
    board: &Board,
    (flags, trouble): (&Flags, Option<&str>),
) {
    let now = Timestamp::now();
    let (pods, events) = (pods.state(), events.state());
    let mut pods_of = BTreeMap::<&str, Vec<&Pod>>::new();
    for pod in &pods {
        pods_of.entry(pod.labels().get(LABEL_JOB).map_or("", String::as_str)).or_default().push(pod);
    }
    let mut events_of = BTreeMap::<&str, Vec<&Event>>::new();
    for event in &events {
        events_of.entry(event.involved_object.name.as_deref().unwrap_or_default()).or_default().push(event);
    }
    let jobs = jobs.state();
    for job in &jobs {
        let name = job.name_any();
        let pods = pods_of.remove(name.as_str()).unwrap_or_default();
        let events = events_of.remove(name.as_str()).unwrap_or_default();
        let seen = Seen { job, pods: &pods, events: &events, trouble };
        let history = histories.of(job, &pods, now);
        board.change(&name, |shown, curves| page::show(&seen, history, flags, now, shown, curves));
    }
    let names: BTreeSet<String> = jobs.iter().map(|job| job.name_any()).collect();
    for gone in histories.retain(|name| names.contains(name)) {
        board.remove(&gone);
    }
}

/// Logs of pods, read when a browser asks.
struct PodLogs {
    pods: Api<Pod>,
}

impl Logs for PodLogs {
    fn tail<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + 'a>> {
        Box::pin(async move {
            let selector = page::selector(job, process).ok_or_else(|| format!("{process} is no process of {job}"))?;
            let wanted = ListParams::default().labels(&selector);
            let found =
                self.pods.list(&wanted).await.map_err(|error| format!("the cluster did not answer: {error}"))?;
            // A successor and its predecessor may both be there.
            let newest = found.items.into_iter().max_by_key(|pod| pod.creation_timestamp().map(|created| created.0));
            let pod = newest.ok_or_else(|| format!("{process} has no pod at the moment"))?;
            let container = pod.spec.as_ref().and_then(|spec| Some(spec.containers.first()?.name.clone()));
            let parameters = LogParams { container, tail_lines: Some(TAIL), ..LogParams::default() };
            let name = pod.name_any();
            self.pods
                .logs(&name, &parameters)
                .await
                .map_err(|error| format!("the log of {name} cannot be read: {error}"))
        })
    }
}
