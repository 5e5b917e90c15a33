//! Asks server 0 for what psjobs-web has not seen of a job's curves: of the time before it began to look, and of pauses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kubectl_psjob::web::jobs::{Id, Jobs};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_api::series_report::MOST_BYTES;
use psjobs_api::{METRICS_PORT, SeriesReport};
use psjobs_web::Board;
use tokio::task::JoinSet;
use tracing::debug;

use crate::server_0::{Answer, Asker, Question};

const QUESTION: Question = Question { path: "/series", most_bytes: MOST_BYTES, deadline: Duration::from_secs(10) };
/// Time without progress of a job after which points are missing. The operator writes progress every 10 s.
const PAUSE: Duration = Duration::from_secs(60);
/// Shortest time between two questions to one server. It doubles with each question in a row that fails.
const PERIOD: Duration = Duration::from_secs(10);
/// How often it doubles: to 11 minutes.
const DOUBLINGS: u32 = 6;
/// Questions under way at once: when psjobs-web starts, all jobs are asked.
const QUESTIONS: usize = 16;

/// The jobs that train, and the questions that are under way.
pub struct Series {
    board: Arc<Board>,
    asker: Asker,
    jobs: BTreeMap<Id, Trained>,
    questions: JoinSet<(Id, String, Answer<SeriesReport>)>,
}

/// One job that trains.
#[derive(Debug, Default)]
struct Trained {
    uid: String,
    /// The steps of its last progress, and since when it has them.
    progress: Option<(u64, Instant)>,
    /// Somebody looks at it.
    is_watched: bool,
    /// When its server is to be asked.
    due: Option<Instant>,
    /// A question is under way.
    is_asked: bool,
    asked: Option<Instant>,
    /// Questions in a row that have failed.
    failed: u32,
}

impl Series {
    pub fn new(board: Arc<Board>) -> Self {
        Self { board, asker: Asker::default(), jobs: BTreeMap::new(), questions: JoinSet::new() }
    }

    /// Notes how far a job is `now`; `None` is one that is gone.
    pub fn see(&mut self, id: &Id, job: Option<&ParameterServerJob>, now: Instant) {
        let trains = job.and_then(|job| {
            let status = job.status.as_ref().filter(|status| status.phase == Some(Phase::Running))?;
            let step = status.progress.as_ref()?.step.unsigned_abs();
            Some((job.metadata.uid.clone()?, step)).filter(|_| step > 0)
        });
        let Some((uid, step)) = trains else {
            self.jobs.remove(id);
            return;
        };
        let known = self.jobs.entry(id.clone()).or_default();
        if known.uid != uid {
            *known = Trained { uid, ..Trained::default() };
        }
        known.see(step, now);
    }

    /// Takes the answers that have come, and asks the servers that are due `now`: first of the jobs that somebody looks at.
    pub fn tick(&mut self, jobs: &Jobs, now: Instant) {
        while let Some(Ok((id, uid, answer))) = self.questions.try_join_next() {
            self.take(jobs, &id, &uid, answer, now);
        }
        let watched = self.board.watched();
        for (id, known) in &mut self.jobs {
            known.look(watched.contains(&id.to_string()), now);
        }
        let mut due: Vec<_> = self.jobs.iter_mut().filter(|(_, known)| known.is_due(now)).collect();
        due.sort_by_key(|(_, known)| !known.is_watched);
        for (id, known) in due {
            if self.questions.len() == QUESTIONS {
                return;
            }
            let Some(server) = jobs.server(id) else { continue };
            known.ask(now);
            let (asker, id, uid) = (self.asker.clone(), id.clone(), known.uid.clone());
            let server = SocketAddr::new(server, METRICS_PORT);
            self.questions.spawn(async move {
                let answer = asker.ask(server, QUESTION).await;
                (id, uid, answer)
            });
        }
    }

    fn take(&mut self, jobs: &Jobs, id: &Id, uid: &str, answer: Answer<SeriesReport>, now: Instant) {
        // A job that has ended meanwhile has its record, or is about to get it.
        let Some(known) = self.jobs.get_mut(id).filter(|known| known.uid == uid) else { return };
        known.answered(answer.is_ok(), now);
        match answer {
            Ok(Some(report)) => self.board.change(&id.to_string(), |job, curves| {
                if !job.is_over {
                    curves.fill(&report, jobs.share());
                    curves.bound(jobs.share());
                }
            }),
            Ok(None) => debug!("server 0 of {id} is of an older version and does not say its series"),
            Err(error) => debug!("server 0 of {id} does not say its series: {error}"),
        }
    }
}

impl Trained {
    /// Notes how many steps are done. Points are missing before the first ones that are seen, and after a pause.
    fn see(&mut self, step: u64, now: Instant) {
        let is_same = self.progress.is_some_and(|(known, _)| known == step);
        if is_same {
            return;
        }
        if self.progress.is_none_or(|(_, since)| now.saturating_duration_since(since) >= PAUSE) {
            self.want(now);
        }
        self.progress = Some((step, now));
    }

    /// Notes whether somebody looks at the job. Points of single trainers are missing while nobody does.
    fn look(&mut self, is_watched: bool, now: Instant) {
        if is_watched && !self.is_watched {
            self.want(now);
        }
        self.is_watched = is_watched;
    }

    fn want(&mut self, now: Instant) {
        let from = self.asked.map_or(now, |asked| now.max(asked + PERIOD));
        self.due = Some(self.due.map_or(from, |due| due.min(from)));
    }

    fn is_due(&self, now: Instant) -> bool {
        !self.is_asked && self.due.is_some_and(|due| due <= now)
    }

    fn ask(&mut self, now: Instant) {
        (self.is_asked, self.asked, self.due) = (true, Some(now), None);
    }

    fn answered(&mut self, is_good: bool, now: Instant) {
        self.is_asked = false;
        if is_good {
            self.failed = 0;
            return;
        }
        let again = now + PERIOD * 2_u32.pow(self.failed);
        self.due = Some(self.due.map_or(again, |due| due.min(again)));
        self.failed = (self.failed + 1).min(DOUBLINGS);
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;

    /// An address of this machine that stands for that of a pod.
    const POD: &str = "127.0.0.14";

    fn job(uid: &str, phase: &str, step: u64) -> ParameterServerJob {
        let template = json!({"spec": {"containers": [{"name": "trainer", "image": "psjobs-worker:0.1.0"}]}});
        let job = json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob",
            "metadata": {"name": "mnist", "namespace": "team", "uid": uid},
            "spec": {"trainer": {"replicas": 1, "template": template}},
            "status": {"phase": phase, "progress": {"step": step, "totalSteps": 90, "percent": 1, "summary": "some"}},
        });
        serde_json::from_value(job).expect("a job")
    }

    fn report(steps: &[u64]) -> SeriesReport {
        SeriesReport {
            steps: steps.to_vec(),
            times: steps.to_vec(),
            examples_per_second: vec![Some(5.0); steps.len()],
            ..SeriesReport::default()
        }
    }

    #[test]
    fn a_server_is_asked_at_first_after_a_pause_and_when_somebody_begins_to_look() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut known = Trained::default();
        let ask = |known: &mut Trained, second| {
            let is_due = known.is_due(at(second));
            if is_due {
                known.ask(at(second));
                known.answered(true, at(second));
            }
            is_due
        };
        for (second, step, is_watched, wanted) in [
            (0, 10, false, true),
            (5, 20, false, false),
            (15, 30, false, false),
            (74, 30, false, false),
            (75, 40, false, true),
            (76, 40, true, false),
            (84, 50, true, false),
            (85, 50, true, true),
            (110, 60, true, false),
            (111, 60, false, false),
            (120, 60, true, true),
        ] {
            known.see(step, at(second));
            known.look(is_watched, at(second));
            assert_eq!(ask(&mut known, second), wanted, "in second {second}");
        }
    }

    #[test]
    fn a_server_that_does_not_answer_is_asked_less_and_less() {
        let began = Instant::now();
        let (mut known, mut asked) = (Trained::default(), Vec::new());
        known.see(1, began);
        for second in 0..1_200 {
            let now = began + Duration::from_secs(second);
            if known.is_due(now) {
                known.ask(now);
                assert!(!known.is_due(now), "one question at a time");
                known.answered(false, now);
                asked.push(second);
            }
        }
        assert_eq!(asked, [0, 10, 30, 70, 150, 310, 630]);
        known.look(true, began + Duration::from_secs(1_200));
        assert!(known.is_due(began + Duration::from_secs(1_200)), "somebody looks");
    }

    #[tokio::test]
    async fn an_answer_is_shown_of_the_job_that_was_asked_and_as_long_as_it_trains() {
        let (board, jobs, now) = (Arc::new(Board::default()), Jobs::default(), Instant::now());
        let id = Id { namespace: "team".into(), name: "mnist".into() };
        let points = || board.job("team/mnist").map_or(0, |(_, curves)| curves.points());
        for (label, phase, uid, wanted) in [
            ("it trains", "Running", "1", 3),
            ("another job has its name", "Running", "2", 0),
            ("it has ended", "Succeeded", "1", 0),
        ] {
            let mut series = Series::new(board.clone());
            series.see(&id, Some(&job(uid, phase, 7)), now);
            series.take(&jobs, &id, "1", Ok(Some(report(&[1, 2, 3]))), now);
            assert_eq!(points(), wanted, "{label}");
            board.remove("team/mnist");
        }
        let mut series = Series::new(board.clone());
        series.see(&id, Some(&job("1", "Running", 7)), now);
        for nothing in [Ok(None), Err("it answered 503".to_owned())] {
            series.take(&jobs, &id, "1", nothing, now);
        }
        series.see(&id, None, now);
        series.take(&jobs, &id, "1", Ok(Some(report(&[1]))), now);
        assert_eq!((board.names(), series.jobs.len()), (vec![], 0), "a job that was deleted does not come back");
    }

    #[tokio::test]
    async fn a_job_that_runs_already_is_shown_with_its_past() {
        let past = report(&[1, 2, 3]);
        let router = Router::new().route("/series", get(async move || past.clone().to_json().expect("JSON")));
        let listener = tokio::net::TcpListener::bind((POD, METRICS_PORT)).await.expect("a free port");
        tokio::spawn(axum::serve(listener, router).into_future());
        let labels = json!({"psjobs.dev/job-name": "mnist", "psjobs.dev/role": "ps", "psjobs.dev/index": "0"});
        let pod = json!({
            "metadata": {"name": "mnist-ps-0", "namespace": "team", "uid": "9", "labels": labels},
            "status": {"phase": "Running", "podIP": POD},
        });
        let (board, mut jobs) = (Arc::new(Board::default()), Jobs::default());
        jobs.see_pod(Event::Apply(serde_json::from_value(pod).expect("a pod")));
        let (mut series, id) = (Series::new(board.clone()), Id { namespace: "team".into(), name: "mnist".into() });
        board.change("team/mnist", |_, curves| curves.push("examples/s", None, 9, 9_000, 4.0));
        series.see(&id, Some(&job("1", "Running", 9)), Instant::now());
        let shown = async {
            while board.job("team/mnist").is_none_or(|(_, curves)| curves.points() == 1) {
                series.tick(&jobs, Instant::now());
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), shown).await.expect("its server is asked");
        let (_, curves) = board.job("team/mnist").expect("it is shown");
        let news = curves.news(&mut psjobs_web::curves::Seen::default()).expect("all is new");
        assert_eq!(news["curves"][0]["points"], json!([1, 1, 5.0, 2, 2, 5.0, 3, 3, 5.0, 9, 9_000, 4.0]));
    }
}
