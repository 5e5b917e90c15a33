//! Polls server 0 of every running job for the progress of training, beside the reconciles, so that a server that does
//! not answer delays none of them. A report with any change leads to a reconcile.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::StatusCode;
use futures::channel::mpsc;
use futures::stream::{self, StreamExt as _};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::{ObjectRef, Store};
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_api::{METRICS_PORT, Role, TrainingStatus};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::debug;

use crate::controller::cache::job_state::JobStates;
use crate::controller::cache::observed_state::ChildCaches;
use crate::controller::model::{CheckpointReport, ProgressReport};
use crate::error_chain::chain;
use crate::metrics::Metrics;

/// Time between two polls of one job, hence also between two writes of progress into its status.
const INTERVAL: Duration = Duration::from_secs(10);
/// How often the poller checks which jobs are due.
const TICK: Duration = Duration::from_secs(1);
/// How long a server may take to answer. A later answer is dropped, and the server is polled again as usual.
const DEADLINE: Duration = Duration::from_secs(2);
/// The longest answer that is read. Usual ones have a few hundred bytes.
const MOST_BYTES: usize = 1 << 20;
/// Servers polled at the same time.
const CONCURRENCY: usize = 64;

/// Reports that may wait for their reconcile. When there are more, the poller waits, because the reconciles are behind
/// and newer reports would only replace these.
pub const PENDING_REPORTS: usize = 256;

/// Polls the servers of running jobs.
pub struct Poller {
    pub jobs: Store<ParameterServerJob>,
    pub children: ChildCaches,
    pub job_states: Arc<JobStates>,
    pub metrics: Metrics,
    /// Queue of jobs that have a new report.
    pub reports: mpsc::Sender<ObjectRef<ParameterServerJob>>,
}

/// The reports in an answer of server 0.
#[derive(Debug)]
struct Answer {
    /// Absent while the server does not have the state of its job.
    progress: Option<ProgressReport>,
    checkpoints: CheckpointReport,
}

/// The reason why a poll brought no report.
#[derive(Debug, thiserror::Error)]
enum PollError {
    #[error("cannot reach server 0 at {0}")]
    Connect(SocketAddr, #[source] hyper_util::client::legacy::Error),
    #[error("server 0 did not answer within {} s", DEADLINE.as_secs())]
    Late(#[from] tokio::time::error::Elapsed),
    #[error("server 0 answered {0}")]
    Answer(StatusCode),
    #[error("server 0 did not end its answer")]
    Body(#[source] axum::Error),
    #[error("server 0 answered something else than its status")]
    Status(#[source] serde_json::Error),
}

impl Poller {
    pub async fn run(mut self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut asked = HashMap::<String, Instant>::new();
        // A connection that is kept until the next poll would only keep a server from ending.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        loop {
            ticks.tick().await;
            let jobs = self.jobs.state();
            self.job_states.retain(&jobs);
            self.metrics.count_jobs(jobs.iter().map(|job| &**job));

            let now = Instant::now();
            asked.retain(|_, when| now.duration_since(*when) < INTERVAL);
            let due = jobs.into_iter().filter(|job| {
                let uid = job.metadata.uid.as_deref().unwrap_or_default();
                is_running(job) && !asked.contains_key(uid)
            });
            let due = due.filter_map(|job| Some((self.server(&job)?, job))).collect::<Vec<_>>();
            asked.extend(due.iter().filter_map(|(_, job)| Some((job.uid()?, now))));
            self.poll(&client, due).await;
        }
    }

    /// Returns the address of server 0, if its pod has one and it has not ended.
    fn server(&self, job: &ParameterServerJob) -> Option<SocketAddr> {
        let name = names::pod(&job.name_any(), job.spec.pod_role(Role::Server), 0);
        let pod = self.children.pods.get(&ObjectRef::new(&name).within(&job.namespace()?))?;
        let server = pod.beside.as_ref().map_or(&pod.observed, |beside| &beside.1);
        let ip: IpAddr = server.ip.as_ref().filter(|_| !server.ended())?.parse().ok()?;
        Some(SocketAddr::new(ip, METRICS_PORT))
    }

    async fn poll(&mut self, client: &Client<HttpConnector, Body>, due: Vec<(SocketAddr, Arc<ParameterServerJob>)>) {
        let answers = due.into_iter().map(|(server, job)| async move {
            let answer = tokio::time::timeout(DEADLINE, ask(client, server)).await;
            (answer.map_err(PollError::from).flatten(), job)
        });
        let mut answers = stream::iter(answers).buffer_unordered(CONCURRENCY);
        while let Some((answer, job)) = answers.next().await {
            self.metrics.polled(answer.is_ok());
            match answer {
                Ok(Answer { progress, checkpoints }) => {
                    let uid = job.uid().unwrap_or_default();
                    let has_moved = progress.is_some_and(|report| self.job_states.record_progress(&uid, report));
                    if self.job_states.record_checkpoints(&uid, checkpoints) || has_moved {
                        // Fails only while the controller is going away.
                        let _ = futures::SinkExt::send(&mut self.reports, ObjectRef::from_obj(&*job)).await;
                    }
                }
                Err(error) => debug!(job = job.name_any(), "no progress: {}", chain(&error)),
            }
        }
    }
}

fn is_running(job: &ParameterServerJob) -> bool {
    let phase = job.status.as_ref().and_then(|status| status.phase);
    matches!(phase, Some(Phase::Running | Phase::Restarting | Phase::Stalled | Phase::Completing))
}

/// Requests the status from the metrics port and not by gRPC: that port needs no certificate, so that the operator need
/// not read any Secret.
async fn ask(client: &Client<HttpConnector, Body>, server: SocketAddr) -> Result<Answer, PollError> {
    let uri = format!("http://{server}/status").parse().expect("an address and a path are a URI");
    let reply = client.get(uri).await.map_err(|error| PollError::Connect(server, error))?;
    let code = reply.status();
    if !matches!(code, StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE) {
        return Err(PollError::Answer(code));
    }
    let body = to_bytes(Body::new(reply.into_body()), MOST_BYTES).await.map_err(PollError::Body)?;
    let status: Result<TrainingStatus, _> = serde_json::from_slice(&body);
    if code == StatusCode::OK {
        return Ok(report(status.map_err(PollError::Status)?));
    }
    // A server without the state of its job knows nothing else than why it has none, if that is the checkpoint folder.
    let failed = status.ok().filter(|status| status.failed_checkpoint.is_some()).ok_or(PollError::Answer(code))?;
    Ok(Answer { progress: None, ..report(failed) })
}

fn report(status: TrainingStatus) -> Answer {
    let at = Timestamp::now();
    let TrainingStatus { step, total_steps, examples_per_second, metrics, checkpoint, stragglers, failed_checkpoint } =
        status;
    let progress =
        ProgressReport { step, total_steps, examples_per_second, metrics, checkpoint, stragglers, at: Some(at) };
    Answer { progress: Some(progress), checkpoints: CheckpointReport { failure: failed_checkpoint, at } }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use psjobs_api::FailedCheckpoint;
    use tokio::net::TcpListener;

    use super::*;

    async fn answer(router: Router) -> Result<Answer, PollError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let server = listener.local_addr().expect("bound");
        let serving = tokio::spawn(axum::serve(listener, router).into_future());
        let client = Client::builder(TokioExecutor::new()).build_http();
        let answer = ask(&client, server).await;
        serving.abort();
        answer
    }

    #[tokio::test]
    async fn server_0_reports_its_status_over_http() {
        let status = TrainingStatus { step: 7, total_steps: 9, stragglers: vec![1], ..TrainingStatus::default() };
        let body = serde_json::to_string(&status).expect("JSON");
        let reported = answer(Router::new().route("/status", get(async || body))).await.expect("an answer");
        let timeless = |answer: Answer| answer.progress.map(|progress| ProgressReport { at: None, ..progress });
        assert_eq!(reported.checkpoints.failure, None);
        let (reported, want) = (timeless(reported), timeless(report(status)));
        assert!(reported.is_some() && reported == want, "{reported:?}");

        let wrong = Router::new().route("/status", get(async || "<html>"));
        assert!(matches!(answer(wrong).await, Err(PollError::Status(_))), "somebody else's port");
        // A worker of an earlier version.
        let missing = answer(Router::new()).await.expect_err("nothing is there").to_string();
        assert_eq!(missing, "server 0 answered 404 Not Found");
    }
    #[tokio::test]
    async fn a_server_without_the_state_of_its_job_reports_why_if_that_is_the_checkpoint_folder() {
        let failure = FailedCheckpoint { message: "create the bucket".into(), unix_seconds: None };
        let status = TrainingStatus { failed_checkpoint: Some(failure.clone()), ..TrainingStatus::default() };
        let body = serde_json::to_string(&status).expect("JSON");
        let waiting =
            answer(Router::new().route("/status", get(async move || (StatusCode::SERVICE_UNAVAILABLE, body))));
        let waiting = waiting.await.expect("an answer");
        assert_eq!((waiting.progress, waiting.checkpoints.failure), (None, Some(failure)));
        for body in ["it does not have the state of the job yet\n", "{}"] {
            let silent =
                answer(Router::new().route("/status", get(async move || (StatusCode::SERVICE_UNAVAILABLE, body))));
            assert!(matches!(silent.await, Err(PollError::Answer(StatusCode::SERVICE_UNAVAILABLE))), "{body}");
        }
    }
}
