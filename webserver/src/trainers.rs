//! Asks server 0 of the jobs that somebody looks at for its trainers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kubectl_psjob::web::jobs::{Id, Jobs};
use psjobs_api::{METRICS_PORT, TrainersReport};
use psjobs_web::trainers::Trainers;
use psjobs_web::{Board, now};
use tokio::task::JoinSet;
use tracing::debug;

use crate::server_0::{Answer, Asker, Question};

/// Time between two questions to one server.
const PERIOD: Duration = Duration::from_secs(2);
/// A trainer has a few hundred bytes.
const QUESTION: Question = Question { path: "/trainers", most_bytes: 8 << 20, deadline: Duration::from_secs(2) };
/// Questions under way at once.
const QUESTIONS: usize = 64;
/// Time after which what a server said last is shown no more.
const OLD: Duration = Duration::from_secs(15);

/// The jobs that are looked at, and what their servers have said.
pub struct Asking {
    board: Arc<Board>,
    asker: Asker,
    jobs: BTreeMap<String, Asked>,
    questions: JoinSet<(String, String, Answer<TrainersReport>)>,
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
        Self { board, asker: Asker::default(), jobs: BTreeMap::new(), questions: JoinSet::new() }
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
            let (asker, uid) = (self.asker.clone(), asked.uid.clone());
            let server = SocketAddr::new(server, METRICS_PORT);
            self.questions.spawn(async move {
                let answer = asker.ask(server, QUESTION).await;
                (key, uid, answer)
            });
        }
    }

    fn take(&mut self, jobs: &Jobs, key: &str, uid: &str, answer: Answer<TrainersReport>, at: Instant) {
        let Some(asked) = self.jobs.get_mut(key) else { return };
        asked.is_asked = false;
        match answer {
            // It was deleted meanwhile: the board would have it again.
            Ok(_) if find(jobs, key).is_none_or(|(_, found)| found != uid) => {}
            Ok(Some(report)) => {
                asked.answered = Some(at);
                let trainers = &mut asked.trainers;
                self.board.change(key, |job, curves| {
                    if !job.is_over {
                        trainers.show(&report, job, curves, now());
                    }
                });
            }
            Ok(None) => debug!("server 0 of {key} is of an older version and says nothing of its trainers"),
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
