//! Asks server 0 of every running job how far training is. It works beside the reconciles, so a server
//! that does not answer delays nobody; a report that tells anything new leads to a reconcile.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc;
use futures::stream::{self, StreamExt as _};
use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::{ObjectRef, Store};
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_api::{CheckpointResult, DEFAULT_PORT, Role};
use tokio::time::{Instant, MissedTickBehavior};
use tonic::transport::Endpoint;
use tracing::debug;

use crate::controller::decide::ProgressReport;
use crate::controller::dereference::Children;
use crate::controller::memory::Memory;
use crate::metrics::Metrics;

mod proto {
    #![allow(clippy::all, reason = "generated")]
    tonic::include_proto!("psjobs.v1");
}

/// Between two questions to one job, hence also between two writes of progress into its status.
const INTERVAL: Duration = Duration::from_secs(10);
/// How often the poller looks for jobs whose turn it is.
const TICK: Duration = Duration::from_secs(1);
/// A server that takes longer is asked again at its next turn.
const DEADLINE: Duration = Duration::from_secs(2);
/// Servers asked at once.
const CONCURRENCY: usize = 64;

/// Reports waiting for their reconcile. With more under way than that the poller waits: the reconciles
/// are behind, and newer reports would only replace these.
pub const PENDING_REPORTS: usize = 256;

/// Asks the servers of running jobs, for ever.
pub struct Poller {
    pub jobs: Store<ParameterServerJob>,
    pub children: Children,
    pub memory: Arc<Memory>,
    pub metrics: Metrics,
    /// Takes the jobs that a new report is about.
    pub reports: mpsc::Sender<ObjectRef<ParameterServerJob>>,
}

/// Why there is no report this time.
#[derive(Debug, thiserror::Error)]
enum PollError {
    #[error("cannot reach server 0 at {0}")]
    Connect(SocketAddr, #[source] tonic::transport::Error),
    #[error("server 0 did not tell its status")]
    Status(#[source] Box<tonic::Status>),
}

impl Poller {
    pub async fn run(mut self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut asked = HashMap::<String, Instant>::new();
        loop {
            ticks.tick().await;
            let jobs = self.jobs.state();
            self.memory.retain(&jobs);
            self.metrics.count_jobs(jobs.iter().map(|job| &**job));

            let now = Instant::now();
            asked.retain(|_, when| now.duration_since(*when) < INTERVAL);
            let due = jobs.into_iter().filter(|job| {
                let uid = job.metadata.uid.as_deref().unwrap_or_default();
                is_running(job) && !asked.contains_key(uid)
            });
            let due = due.filter_map(|job| Some((self.server(&job)?, job))).collect::<Vec<_>>();
            asked.extend(due.iter().filter_map(|(_, job)| Some((job.uid()?, now))));
            self.poll(due).await;
        }
    }

    /// Address of server 0, if its pod has one.
    fn server(&self, job: &ParameterServerJob) -> Option<SocketAddr> {
        let pod = ObjectRef::new(&names::pod(&job.name_any(), Role::Server, 0)).within(&job.namespace()?);
        let ip: IpAddr = self.children.pods.get(&pod)?.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
        Some(SocketAddr::new(ip, DEFAULT_PORT))
    }

    async fn poll(&mut self, due: Vec<(SocketAddr, Arc<ParameterServerJob>)>) {
        let answers = due.into_iter().map(|(server, job)| async move { (ask(server).await, job) });
        let mut answers = stream::iter(answers).buffer_unordered(CONCURRENCY);
        while let Some((answer, job)) = answers.next().await {
            self.metrics.polled(answer.is_ok());
            match answer {
                Ok(report) => {
                    if self.memory.report(&job.uid().unwrap_or_default(), report) {
                        // Fails only while the controller is going away.
                        let _ = futures::SinkExt::send(&mut self.reports, ObjectRef::from_obj(&*job)).await;
                    }
                }
                Err(error) => debug!(job = job.name_any(), "no progress: {}", crate::chain(&error)),
            }
        }
    }
}

fn is_running(job: &ParameterServerJob) -> bool {
    let phase = job.status.as_ref().and_then(|status| status.phase);
    matches!(phase, Some(Phase::Running | Phase::Restarting | Phase::Stalled))
}

async fn ask(server: SocketAddr) -> Result<ProgressReport, PollError> {
    let endpoint = Endpoint::from_shared(format!("http://{server}")).map_err(|e| PollError::Connect(server, e))?;
    let endpoint = endpoint.connect_timeout(DEADLINE).timeout(DEADLINE);
    let channel = endpoint.connect().await.map_err(|e| PollError::Connect(server, e))?;
    let mut client = proto::coordination_client::CoordinationClient::new(channel);
    let reply = client.status(proto::StatusRequest {}).await.map_err(|e| PollError::Status(Box::new(e)))?;
    Ok(report(reply.into_inner()))
}

fn report(reply: proto::StatusReply) -> ProgressReport {
    let proto::StatusReply { step, total_steps, examples_per_second, metrics, checkpoint, stragglers, .. } = reply;
    let metrics = metrics.into_iter().collect();
    let checkpoint = checkpoint.map(|proto::CheckpointStatus { step, path, unix_seconds }| CheckpointResult {
        step,
        path,
        unix_seconds,
    });
    let at = Some(Timestamp::now());
    ProgressReport { step, total_steps, examples_per_second, metrics, checkpoint, stragglers, at }
}
