//! The task of server 0 that sends what is new, again and again, until the job is over.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use psjobs_ps::checkpoint::export::MODEL;
use psjobs_ps::checkpoint::{Disk, Folder};
use psjobs_ps::series::reader::SeriesReader;
use reqwest::Body;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::backlog::Backlog;
use crate::client::Client;
use crate::durable::Durable;
use crate::error::{TrackingError, words};
use crate::files::{Files, Folders};
use crate::messages::{Job, Run};
use crate::model::{self, FileBody};
use crate::settings::Settings;

/// Pause between two looks at the files.
const PAUSE: Duration = Duration::from_secs(2);
/// Pause where each look is a request to an object store.
const LONG_PAUSE: Duration = Duration::from_secs(10);
/// Pauses after a failure: the first, and the longest, to which they double.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// Time for the rest when the job is over.
const AT_THE_END: Duration = Duration::from_secs(30);
/// Time for points when this process is stopped, and for the status of the run: within the time that it has to end.
const WHEN_STOPPED: Duration = Duration::from_secs(2);

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The job is over: all points are sent, the model, too.
    Finished,
    /// This process was asked to end. Another one may go on with the job, and with the run.
    Stopped,
    /// This process has failed. Another one may go on.
    Failed,
    /// Another one goes on already.
    Replaced,
}

/// The task that follows a job.
#[derive(Debug)]
pub struct Follower {
    task: JoinHandle<bool>,
    end: oneshot::Sender<Ending>,
}

/// Begins to follow `job`, on the runtime of the caller.
///
/// # Errors
/// If this process cannot send requests.
pub fn follow(settings: Settings, job: Job, folders: Folders) -> Result<Follower, TrackingError> {
    let client = Client::new(settings)?;
    let (end, ends) = oneshot::channel();
    let disk = Files::disk(&folders);
    let checkpoints = folders.checkpoints.clone();
    let files = Arc::new(Mutex::new(Files::new(folders, &job.uid)));
    let task = Task { client, job, disk, checkpoints, files, session: None, has_said: false, retry: None };
    Ok(Follower { task: tokio::spawn(task.run(ends)), end })
}

impl Follower {
    /// Sends what remains, in a limited time, and ends the run. Returns whether the run has all points that it is to have.
    pub async fn end(self, ending: Ending) -> bool {
        // A task that has panicked hears nothing.
        let _ = self.end.send(ending);
        self.task.await.unwrap_or_else(|error| {
            warn!(%error, "the task that sends metrics to MLflow has ended early");
            false
        })
    }
}

struct Task {
    client: Client,
    job: Job,
    disk: Disk,
    checkpoints: Option<Folder>,
    /// Locked while the disk works, and by nothing else.
    files: Arc<Mutex<Files>>,
    /// State of the run as far as it is known, until a request fails: that may have come through.
    session: Option<Session>,
    /// The log has the run's address.
    has_said: bool,
    /// The pause after the next failure, while nothing comes through.
    retry: Option<Duration>,
}

/// State of a run, since it was read.
struct Session {
    run: Run,
    reader: Option<SeriesReader>,
    backlog: Backlog,
}

impl Task {
    /// Returns whether the run has all points at the end.
    async fn run(mut self, mut ends: oneshot::Receiver<Ending>) -> bool {
        let pause = if self.disk.grows_by_rewriting() { LONG_PAUSE } else { PAUSE };
        let ending = loop {
            // A request that the end interrupts may have come through: what the run has is read again.
            let sent = tokio::select! {
                biased;
                ending = &mut ends => break ending,
                sent = self.send_new(false) => sent,
            };
            let pause = match sent {
                Ok(()) => {
                    self.is_back();
                    pause
                }
                Err(error) => self.is_away(&error),
            };
            tokio::select! {
                biased;
                ending = &mut ends => break ending,
                () = tokio::time::sleep(pause) => {}
            }
        };
        // Without a word the process has panicked.
        self.conclude(ending.unwrap_or(Ending::Failed)).await
    }

    /// Says once that the server is away; returns the pause until it is asked again.
    fn is_away(&mut self, error: &TrackingError) -> Duration {
        let pause = self.retry.unwrap_or(FIRST_RETRY);
        if self.retry.is_none() {
            warn!(%error, "MLflow does not take the job's metrics; trying again, training goes on and no point is lost");
        }
        self.retry = Some(LONGEST_RETRY.min(pause * 2));
        pause
    }

    fn is_back(&mut self) {
        if self.retry.take().is_some() {
            info!(uri = self.client.uri(), "MLflow takes the job's metrics again, and has those of meanwhile");
        }
    }

    /// Sends what may be sent and the run does not have; `all` at the end of the job.
    async fn send_new(&mut self, all: bool) -> Result<(), TrackingError> {
        let session = match self.session.take() {
            Some(session) => session,
            None => self.begin().await?,
        };
        let (mut session, durable) = self.read(session).await?;
        let durable = if all { Durable::All } else { durable };
        loop {
            let metrics = session.backlog.next(&durable);
            if metrics.is_empty() {
                break;
            }
            self.client.log_metrics(&session.run.info.run_id, &metrics).await?;
            session.backlog.sent(metrics);
        }
        self.session = Some(session);
        Ok(())
    }

    /// Finds the run, or makes it, and gives it the parameters that it lacks.
    async fn begin(&mut self) -> Result<Session, TrackingError> {
        let experiment = self.client.experiment().await?;
        let run = self.client.run(&experiment, &self.job, now()).await?;
        let run_id = &run.info.run_id;
        self.client.log_parameters(run_id, &run.missing(&self.job.parameters)).await?;
        if run.info.status != "RUNNING" {
            // A process before this one has ended.
            self.client.update(run_id, "RUNNING", None).await?;
        }
        if !std::mem::replace(&mut self.has_said, true) {
            let uri = self.client.uri();
            info!("the job is the run {uri}/#/experiments/{experiment}/runs/{run_id} of MLflow");
        }
        let backlog = Backlog::new(run.positions());
        Ok(Session { run, reader: None, backlog })
    }

    /// Reads what was written since the last time.
    async fn read(&self, mut session: Session) -> Result<(Session, Durable), TrackingError> {
        let (files, now) = (self.files.clone(), Instant::now());
        let work = move || -> Result<(Session, Durable), TrackingError> {
            let Session { reader, backlog, .. } = &mut session;
            let durable = files.lock().read(reader, backlog, now)?;
            Ok((session, durable))
        };
        self.disk.work(work).await
    }

    /// Sends the rest and ends the run; returns whether the run has all points that it is to have.
    async fn conclude(&mut self, ending: Ending) -> bool {
        let (status, limit) = match ending {
            Ending::Finished => ("FINISHED", AT_THE_END),
            Ending::Stopped => ("KILLED", WHEN_STOPPED),
            Ending::Failed => ("FAILED", WHEN_STOPPED),
            Ending::Replaced => return true,
        };
        let until = Instant::now() + limit;
        let is_finished = ending == Ending::Finished;
        let (mut last, mut is_sent) = (None, false);
        while !is_sent {
            self.session = None;
            match tokio::time::timeout_at(until, self.send_new(is_finished)).await {
                Ok(Ok(())) => is_sent = true,
                Ok(Err(error)) => {
                    last = Some(error);
                    if Instant::now() + FIRST_RETRY >= until {
                        break;
                    }
                    tokio::time::sleep(FIRST_RETRY).await;
                }
                Err(_) => break,
            }
        }
        let Some(Session { run, .. }) = self.session.take().filter(|_| is_sent) else {
            let error = last.map_or_else(|| "it does not answer in time".to_owned(), |error| error.to_string());
            let seconds = limit.as_secs();
            warn!(
                error,
                seconds, "MLflow lacks the last metrics of the job; `psjobs-worker track` sends those that are kept"
            );
            return false;
        };
        if is_finished && let Some(folder) = &self.checkpoints {
            self.upload(&run, folder).await;
        }
        let update = self.client.update(&run.info.run_id, status, Some(now()));
        match tokio::time::timeout(WHEN_STOPPED, update).await {
            Ok(Ok(())) => info!(status, run = run.info.run_id, "MLflow has all metrics that stay"),
            Ok(Err(error)) => warn!(%error, status, "MLflow does not know how the job has ended"),
            Err(_) => warn!(status, "MLflow does not know how the job has ended, because it does not answer in time"),
        }
        true
    }

    /// Sends the trained model, if the tracking server takes it.
    async fn upload(&self, run: &Run, folder: &Folder) {
        let place = folder.join(MODEL);
        let model = place.display();
        let Some(path) = model::path_of(&run.info.artifact_uri, MODEL) else {
            let artifacts = &run.info.artifact_uri;
            info!(%model, artifacts, "the model is not sent to MLflow, whose artefacts do not pass its server; it stays here");
            return;
        };
        let opening = folder.clone();
        let (body, bytes) = match self.disk.work(move || FileBody::open(&opening, MODEL)).await {
            Ok(opened) => opened,
            Err(error) => return warn!(error = words(&error), %model, "the model cannot be read for MLflow"),
        };
        match self.client.upload(&path, Body::wrap(body), model::limit(bytes)).await {
            Ok(()) => info!(%model, bytes, "MLflow has the model"),
            Err(error) => warn!(%error, %model, "MLflow does not have the model; it stays here"),
        }
    }
}

/// Returns the time in milliseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
