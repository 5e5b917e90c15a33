//! Asks server 0 of the jobs that somebody looks at for its trainers.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::StatusCode;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kubectl_psjob::web::jobs::{Id, Jobs};
use psjobs_api::{METRICS_PORT, TrainersReport};
use psjobs_web::trainers::Trainers;
use psjobs_web::{Board, now};
use tokio::task::JoinSet;
use tracing::debug;

/// Time between two questions to one server.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a server may take to answer. A later answer is dropped.
const DEADLINE: Duration = Duration::from_secs(2);
/// The longest answer that is read: a trainer has a few hundred bytes.
const MOST_BYTES: usize = 8 << 20;
/// Questions under way at once.
const QUESTIONS: usize = 64;
/// Time after which what a server said last is shown no more.
const OLD: Duration = Duration::from_secs(15);

/// The jobs that are looked at, and what their servers have said.
pub struct Asking {
    board: Arc<Board>,
    client: Client<HttpConnector, Body>,
    jobs: BTreeMap<String, Asked>,
    questions: JoinSet<(String, String, Result<TrainersReport, String>)>,
}

/// One job that is looked at.
#[derive(Default)]
struct Asked {
    /// Uid of the job: another one of the name has other trainers.
    uid: String,
    trainers: Trainers,
    /// A question is under way.
    is_asked: bool,
    asked: Option<Instant>,
    answered: Option<Instant>,
}

impl Asking {
    pub fn new(board: Arc<Board>) -> Self {
        // A connection that is kept until the next question would only keep a server from ending.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        Self { board, client, jobs: BTreeMap::new(), questions: JoinSet::new() }
    }

    /// Shows the answers that have come, and asks the servers that are due `now`.
    pub fn tick(&mut self, jobs: &Jobs, now: Instant) {
        while let Some(Ok((key, uid, answer))) = self.questions.try_join_next() {
            self.take(jobs, &key, &uid, answer, now);
        }
        let watched = self.board.watched();
        self.jobs.retain(|key, _| watched.contains(key));
        for key in watched {
            let Some((id, uid)) = find(jobs, &key) else { continue };
            let asked = self.jobs.entry(key.clone()).or_default();
            if asked.uid != uid {
                *asked = Asked { uid, ..Asked::default() };
            }
            if asked.answered.is_some_and(|answered| now.duration_since(answered) >= OLD) {
                asked.answered = None;
                self.board.change(&key, |job, _| job.trainers.clear());
            }
            let is_due = !asked.is_asked && asked.asked.is_none_or(|asked| now.duration_since(asked) >= PERIOD);
            let Some(server) = jobs.server(&id).filter(|_| is_due && self.questions.len() < QUESTIONS) else {
                continue;
            };
            (asked.is_asked, asked.asked) = (true, Some(now));
            let (client, uid) = (self.client.clone(), asked.uid.clone());
            self.questions.spawn(async move {
                let answer = tokio::time::timeout(DEADLINE, ask(&client, server)).await;
                (key, uid, answer.unwrap_or_else(|_| Err("it did not answer in time".to_owned())))
            });
        }
    }

    fn take(&mut self, jobs: &Jobs, key: &str, uid: &str, answer: Result<TrainersReport, String>, at: Instant) {
        let Some(asked) = self.jobs.get_mut(key) else { return };
        asked.is_asked = false;
        match answer {
            // It was deleted meanwhile: the board would have it again.
            Ok(_) if find(jobs, key).is_none_or(|(_, found)| found != uid) => {}
            Ok(report) => {
                asked.answered = Some(at);
                let trainers = &mut asked.trainers;
                self.board.change(key, |job, curves| {
                    if !job.is_over {
                        trainers.show(&report, job, curves, now());
                    }
                });
            }
            Err(error) => debug!("server 0 of {key} says nothing of its trainers: {error}"),
        }
    }
}

/// Returns the job that the cluster has under the name that the page shows, and its uid.
fn find(jobs: &Jobs, key: &str) -> Option<(Id, String)> {
    let (namespace, name) = key.split_once('/')?;
    let id = Id { namespace: namespace.to_owned(), name: name.to_owned() };
    let uid = jobs.job(&id)?.metadata.uid.clone()?;
    Some((id, uid))
}

async fn ask(client: &Client<HttpConnector, Body>, server: IpAddr) -> Result<TrainersReport, String> {
    let address = SocketAddr::new(server, METRICS_PORT);
    let uri = format!("http://{address}/trainers").parse().map_err(|error| format!("{address}: {error}"))?;
    let reply = client.get(uri).await.map_err(|error| error.to_string())?;
    if reply.status() != StatusCode::OK {
        return Err(format!("it answered {}", reply.status()));
    }
    let body = to_bytes(Body::new(reply.into_body()), MOST_BYTES).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&body).map_err(|error| error.to_string())
}
