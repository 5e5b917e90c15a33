//! `kubectl psjob web`: the page of the jobs of a namespace, served on this machine.

pub mod facts;
pub mod follow;
pub mod jobs;
pub mod page;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, LogParams};
use kube::{Api, ResourceExt as _};
use psjobs::BadInput;
use psjobs_web::{Board, Door, Logs, Site};

use self::follow::{Scope, follow};
use self::jobs::{Jobs, Naming};
use crate::connection::ConnectionArgs;
use crate::programs::programs;
use crate::top::board::place;

/// Lines at the end of a log that the page shows.
pub const TAIL: i64 = 500;

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
        let pods = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let logs = Arc::new(PodLogs { pods });
        let naming = Naming::OneNamespace(connection.as_flags());
        let scope = Scope { namespace: Some(cluster.namespace.clone()), name: self.name };
        let show = |jobs: &mut Jobs| {
            for id in jobs.changed() {
                jobs.show(&id, &naming, &board, Timestamp::now());
            }
        };
        let serving = psjobs_web::serve(listener, Site { board: board.clone(), logs, token });
        tokio::select! {
            served = serving => served.context("the page cannot be served any more")?,
            () = follow(&cluster.client, &scope, show) => {}
            pressed = tokio::signal::ctrl_c() => pressed?,
        }
        Ok(0)
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
        Box::pin(tail(&self.pods, job, process))
    }
}

/// Returns the last lines that a process of a job wrote.
///
/// # Errors
/// If it has no pod, or its log cannot be read; the text is a sentence for people.
pub async fn tail(pods: &Api<Pod>, job: &str, process: &str) -> Result<String, String> {
    let (role, index, selector) =
        page::selector(job, process).ok_or_else(|| format!("{process} is no process of {job}"))?;
    let wanted = ListParams::default().labels(&selector);
    let found = pods.list(&wanted).await.map_err(|error| format!("the cluster did not answer: {error}"))?;
    // A successor and its predecessor may both be there.
    let is_meant = |program: &Pod| place(program).is_some_and(|(of, nth, _)| (of, nth) == (role, index));
    let found = found.items.into_iter().flat_map(programs).filter(is_meant);
    let newest = found.max_by_key(|pod| pod.creation_timestamp().map(|created| created.0));
    let pod = newest.ok_or_else(|| format!("{process} has no pod at the moment"))?;
    let container = pod.spec.as_ref().and_then(|spec| Some(spec.containers.first()?.name.clone()));
    let parameters = LogParams { container, tail_lines: Some(TAIL), ..LogParams::default() };
    let name = pod.name_any();
    pods.logs(&name, &parameters).await.map_err(|error| format!("the log of {name} cannot be read: {error}"))
}
