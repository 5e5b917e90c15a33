//! The operator's process from start to end: waits for the cluster and for its election, runs the controller, shuts down.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::FutureExt as _;
use futures::channel::mpsc;
use kube::api::ListParams;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use psjobs_api::crd::ParameterServerJob;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::controller::cache::job_state::JobStates;
use crate::controller::shard::Shard;
use crate::controller::write::events;
use crate::controller::write::write_priority::PriorityLimiter;
use crate::controller::write::writer::Writer;
use crate::controller::{self, Context, Watches};
use crate::error_chain::chain;
use crate::http::{self, Readiness};
use crate::leader::Candidate;
use crate::lease::Tenure;
use crate::metrics::Metrics;
use crate::progress::{PENDING_REPORTS, Poller};
use crate::settings::Settings;
use crate::trim;

/// Name of the operator in events and as field manager.
const NAME: &str = "psjobs-operator";
/// Time between two checks for a definition that is not installed yet.
const RECHECK: Duration = Duration::from_secs(5);
/// How long the queued events may take to be written at the end.
const LAST_EVENTS: Duration = Duration::from_secs(5);

/// Runs the operator until `stop`, then shuts it down.
///
/// # Errors
/// Only for errors that do not pass with time: an address in use, a lease that may not be written.
pub async fn operate(settings: Settings, config: kube::Config, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = TcpListener::bind(settings.metrics_addr)
        .await
        .with_context(|| format!("cannot listen on {}; choose another --metrics-addr", settings.metrics_addr))?;
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let readiness = Readiness::default();
    let serving = tokio::spawn(http::serve(listener, registry, readiness.clone(), stop.clone()));

    let own_namespace = config.default_namespace.clone();
    let client = Client::try_from(config).context("the cluster's address or credentials cannot be used")?;
    let operator = Operator { settings, client, own_namespace, metrics };
    tokio::select! {
        () = operator.wait_until_installed(&readiness) => operator.take_part(&stop).await?,
        () = stop.cancelled() => {}
    }
    serving.await.context("the HTTP server ended badly")?.context("the HTTP server failed")
}

struct Operator {
    settings: Settings,
    client: Client,
    own_namespace: String,
    metrics: Metrics,
}

impl Operator {
    fn namespace(&self) -> Option<&str> {
        self.settings.namespace.as_deref()
    }

    fn identity(&self) -> String {
        let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let own = || host().map_or_else(|| NAME.to_owned(), |host| host.trim().to_owned());
        self.settings.identity.clone().unwrap_or_else(own)
    }

    /// Waits until the definition of jobs is installed, which may happen after the operator is. A crash loop instead would
    /// be in its back-off for minutes after the definition is there.
    async fn wait_until_installed(&self, readiness: &Readiness) {
        let jobs: Api<ParameterServerJob> = match self.namespace() {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        loop {
            let why = match jobs.list_metadata(&ListParams::default().limit(1)).await {
                Ok(_) => return readiness.set(Ok(())),
                Err(kube::Error::Api(status)) if status.is_not_found() => {
                    "the definition of ParameterServerJob is not installed; run kubectl apply --server-side \
                     -f crds/parameterserverjobs.psjobs.dev.yaml, or install the chart with crds.install=true"
                        .to_owned()
                }
                Err(kube::Error::Api(status)) => format!("jobs cannot be listed: {}", status.message),
                Err(error) => format!("the API server does not answer: {}", chain(&error)),
            };
            warn!("{why}; looking again in {} s", RECHECK.as_secs());
            readiness.set(Err(why));
            tokio::time::sleep(RECHECK).await;
        }
    }

    /// Runs the controller whenever this operator leads.
    async fn take_part(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        if !self.settings.leader_elect {
            self.lead(Arc::new(Tenure::unlimited()), stop.child_token()).await;
            return Ok(());
        }
        let namespace = self.settings.lease_namespace.as_ref().unwrap_or(&self.own_namespace);
        let shard = self.settings.shard.as_deref();
        let mut candidate = Candidate::enter(self.client.clone(), namespace, shard, &self.identity())
            .await
            .with_context(|| format!("cannot take part in the election in namespace {namespace}; the operator needs get, create and patch on leases there"))?;
        while !stop.is_cancelled() {
            tokio::select! {
                () = candidate.until(true) => {}
                () = stop.cancelled() => break,
            }
            info!("this operator leads");
            tokio::select! {
                () = self.lead(candidate.tenure(), stop.child_token()) => {}
                // The controller is dropped at once: another operator may work already.
                () = candidate.until(false) => warn!("the lease is lost or could not be renewed in time; another operator may lead"),
            }
            self.metrics.leads(false);
        }
        candidate.leave().await;
        Ok(())
    }

    /// Runs the controller and the poller until `stop`, with writes while `tenure` holds.
    async fn lead(&self, tenure: Arc<Tenure>, stop: CancellationToken) {
        self.metrics.leads(true);
        let (reports, reported) = mpsc::channel(PENDING_REPORTS);
        let shard = Shard(self.settings.shard.clone());
        let watches = Watches::new(&self.client, self.namespace(), &shard, reported);
        let job_states = Arc::new(JobStates::default());
        let limiter = Arc::new(PriorityLimiter::default());
        let (recorder, event_writer) = events::channel();
        let poller = Poller {
            jobs: watches.jobs(),
            children: watches.children(),
            job_states: job_states.clone(),
            metrics: self.metrics.clone(),
            reports,
        };
        let reporter = Reporter { controller: NAME.into(), instance: Some(self.identity()) };
        let context = Context {
            writer: Writer::new(self.client.clone(), limiter.clone(), self.metrics.clone(), tenure),
            children: watches.children(),
            jobs: job_states,
            events: recorder,
            metrics: self.metrics.clone(),
            shard,
            worker_image: self.settings.worker_image.clone(),
        };
        let recorder = Recorder::new(self.client.clone(), reporter);
        let mut writing_events = pin!(event_writer.run(recorder, limiter, self.metrics.clone()).fuse());
        tokio::select! {
            () = controller::run(watches, Arc::new(context), stop.cancelled_owned()) => {}
            () = poller.run() => {}
            () = trim::run() => {}
            () = &mut writing_events => {}
        }
        if tokio::time::timeout(LAST_EVENTS, writing_events).await.is_err() {
            warn!("not all events could be written before the end");
        }
    }
}
