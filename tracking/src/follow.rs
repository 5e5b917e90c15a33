//! The task of server 0 that sends what is new, again and again, until the job is over.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use psjobs_ps::checkpoint::export::MODEL;
use psjobs_ps::checkpoint::{Disk, Folder};
use psjobs_ps::series::reader::SeriesReader;
use reqwest::Body;
use tokio::sync::watch;
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
use crate::progress::standstill;
use crate::settings::Settings;

/// Pause between two looks at the files.
const PAUSE: Duration = Duration::from_secs(2);
/// Pause where each look is a request to an object store.
const LONG_PAUSE: Duration = Duration::from_secs(10);
/// Pauses after a failure: the first, and the longest, to which they double.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// Time without progress after which the rest is given up when the job is over.
const AT_THE_END: Duration = Duration::from_secs(30);
/// Time for points when this process is stopped, and for the status of the run: within the time that it has to end.
const WHEN_STOPPED: Duration = Duration::from_secs(2);
/// Time after which the model is not sent if the server takes nothing of it.
const NOTHING_TAKEN: Duration = Duration::from_secs(60);

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
    ends: watch::Sender<Option<Ending>>,
}

/// Begins to follow `job`, on the runtime of the caller.
///
/// # Errors
/// If this process cannot send requests.
pub fn follow(settings: Settings, job: Job, folders: Folders) -> Result<Follower, TrackingError> {
    let client = Client::new(settings)?;
    let (ends, ending) = watch::channel(None);
    let task = Task {
        client,
        disk: Files::disk(&folders),
        checkpoints: folders.checkpoints.clone(),
        pause: if Files::are_remote(&folders) { LONG_PAUSE } else { PAUSE },
        files: Arc::new(Mutex::new(Files::new(folders, &job.uid))),
        job,
        session: None,
        has_said: false,
        outage: Outage::default(),
        error: None,
        signs: watch::Sender::new(()),
    };
    Ok(Follower { task: tokio::spawn(task.run(ending)), ends })
}

impl Follower {
    /// Sends what remains, and ends the run. At the end of the job this takes as long as the server takes values; otherwise the
    /// time is limited. Returns whether the run has all points that it is to have.
    pub async fn end(self, ending: Ending) -> bool {
        if ending == Ending::Replaced {
            self.task.abort();
            return true;
        }
        self.ends.send_replace(Some(ending));
        self.task.await.unwrap_or_else(|error| {
            warn!(%error, "the task that sends metrics to MLflow has ended early");
            false
        })
    }
}

/// Waits for the end of the process.
async fn ended(ends: &mut watch::Receiver<Option<Ending>>) -> Ending {
    let ending = ends.wait_for(Option::is_some).await.map(|ending| *ending);
    // Without a word the process has panicked.
    ending.ok().flatten().unwrap_or(Ending::Failed)
}

/// Resolves when the process ends and the time for what remains is over, with words for the log.
async fn out_of_time(mut ends: watch::Receiver<Option<Ending>>, signs: watch::Receiver<()>) -> String {
    if ended(&mut ends).await == Ending::Finished {
        standstill(signs, AT_THE_END).await;
        return format!("not all was sent, and nothing in the last {} s", AT_THE_END.as_secs());
    }
    tokio::time::sleep(WHEN_STOPPED).await;
    format!("not all was sent in {} s", WHEN_STOPPED.as_secs())
}

struct Task {
    client: Client,
    job: Job,
    disk: Disk,
    checkpoints: Option<Folder>,
    /// Time between two looks at the files.
    pause: Duration,
    /// Locked while the disk works, and by nothing else.
    files: Arc<Mutex<Files>>,
    /// State of the run as far as it is known, until a request fails: that may have come through.
    session: Option<Session>,
    /// The log has the run's address.
    has_said: bool,
    outage: Outage,
    /// The last failure, until something succeeds.
    error: Option<TrackingError>,
    /// Gets a sign for values that the run has got, and for records that were read.
    signs: watch::Sender<()>,
}

/// State of a run, since it was read.
struct Session {
    run: Run,
    reader: Option<SeriesReader>,
    backlog: Backlog,
}

/// Failures in a row.
#[derive(Debug, Default)]
struct Outage {
    /// The pause after the next one, if there was one.
    retry: Option<Duration>,
    /// The log says that there are failures.
    is_said: bool,
}

impl Outage {
    /// Takes a failure. Returns whether the log is to say so, which it does once, and the pause until the next try. A first
    /// one that `may_pass` is not said.
    fn fails(&mut self, may_pass: bool) -> (bool, Duration) {
        let is_first = self.retry.is_none();
        let pause = self.retry.unwrap_or(FIRST_RETRY);
        self.retry = Some(LONGEST_RETRY.min(pause * 2));
        let says = !(self.is_said || is_first && may_pass);
        self.is_said |= says;
        (says, pause)
    }

    /// Takes a success. Returns whether the log said that there were failures.
    fn ends(&mut self) -> bool {
        std::mem::take(self).is_said
    }
}

impl Task {
    /// Returns whether the run has all points at the end.
    async fn run(mut self, mut ends: watch::Receiver<Option<Ending>>) -> bool {
        let over = out_of_time(ends.clone(), self.signs.subscribe());
        let sent = tokio::select! {
            biased;
            ending = self.send_until(&mut ends) => Ok(ending),
            words = over => Err(words),
        };
        match sent {
            Ok(ending) => {
                self.conclude(ending).await;
                true
            }
            Err(words) => {
                let error = self.error.map_or(words, |error| error.to_string());
                warn!(
                    error,
                    "MLflow lacks the last metrics of the job; `psjobs-worker track` sends those that are kept"
                );
                false
            }
        }
    }

    /// Sends what is new again and again. Returns how the process ends, when it does and the run has all points that it is
    /// to have.
    async fn send_until(&mut self, ends: &mut watch::Receiver<Option<Ending>>) -> Ending {
        let mut known = *ends.borrow();
        loop {
            let sent = self.send_new(known == Some(Ending::Finished)).await;
            let pause = match (sent, known) {
                (Ok(()), Some(ending)) => return ending,
                (Ok(()), None) => {
                    self.is_back();
                    self.pause
                }
                (Err(error), _) => {
                    let pause = if known.is_some() { FIRST_RETRY } else { self.is_away(&error) };
                    self.error = Some(error);
                    pause
                }
            };
            tokio::select! {
                biased;
                ending = ended(ends), if known.is_none() => known = Some(ending),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Says once that the server or the disk is away; returns the pause until it is asked again.
    fn is_away(&mut self, error: &TrackingError) -> Duration {
        // An object may be replaced while it is read.
        let is_of_disk = matches!(error, TrackingError::Disk(_));
        let (says, pause) = self.outage.fails(is_of_disk);
        if says && is_of_disk {
            warn!(%error, "the job's metrics cannot be sent to MLflow; trying again, training goes on");
        } else if says {
            warn!(%error, "MLflow does not take the job's metrics; trying again, training goes on and no point is lost");
        }
        pause
    }

    fn is_back(&mut self) {
        self.error = None;
        if self.outage.ends() {
            info!(uri = self.client.uri(), "MLflow gets the job's metrics again, and has those of meanwhile");
        }
    }

    /// Sends what may be sent and the run does not have; `all` at the end of the job.
    async fn send_new(&mut self, all: bool) -> Result<(), TrackingError> {
        let session = match self.session.take() {
            Some(session) => session,
            None => self.begin().await?,
        };
        let (mut session, durable) = self.read(session, all).await;
        let durable = match durable {
            Ok(durable) => durable,
            Err(error) => {
                self.session = Some(session);
                return Err(error);
            }
        };
        loop {
            let metrics = session.backlog.next(&durable);
            if metrics.is_empty() {
                break;
            }
            self.client.log_metrics(&session.run.info.run_id, &metrics).await?;
            session.backlog.sent(metrics);
            self.signs.send_replace(());
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

    /// Reads what was written since the last time; `all` at the end of the job.
    async fn read(&self, mut session: Session, all: bool) -> (Session, Result<Durable, TrackingError>) {
        let (files, now) = (self.files.clone(), Instant::now());
        // After a failure the same may be read again and again.
        let signs = self.error.is_none().then(|| self.signs.clone());
        let work = move || {
            let has_read = || {
                if let Some(signs) = &signs {
                    signs.send_replace(());
                }
            };
            let Session { reader, backlog, .. } = &mut session;
            let durable = files.lock().read(reader, backlog, all, now, has_read);
            (session, durable)
        };
        self.disk.work(work).await
    }

    /// Ends the run, which has all points that it is to have.
    async fn conclude(&self, ending: Ending) {
        let Some(Session { run, .. }) = &self.session else { return };
        let status = match ending {
            Ending::Finished => "FINISHED",
            Ending::Stopped => "KILLED",
            Ending::Failed => "FAILED",
            Ending::Replaced => return,
        };
        if ending == Ending::Finished
            && let Some(folder) = &self.checkpoints
        {
            self.upload(run, folder).await;
        }
        let update = self.client.update(&run.info.run_id, status, Some(now()));
        match tokio::time::timeout(WHEN_STOPPED, update).await {
            Ok(Ok(())) => info!(status, run = run.info.run_id, "MLflow has all metrics that stay"),
            Ok(Err(error)) => warn!(%error, status, "MLflow does not know how the job has ended"),
            Err(_) => warn!(status, "MLflow does not know how the job has ended, because it does not answer in time"),
        }
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
        let (body, bytes, signs) = match self.disk.work(move || FileBody::open(&opening, MODEL)).await {
            Ok(opened) => opened,
            Err(error) => return warn!(error = words(&error), %model, "the model cannot be read for MLflow"),
        };
        let sent = tokio::select! {
            sent = self.client.upload(&path, Body::wrap(body), model::limit(bytes)) => sent,
            () = standstill(signs, NOTHING_TAKEN) => {
                let words = format!("it has taken nothing of the model for {} s", NOTHING_TAKEN.as_secs());
                Err(TrackingError::Away { uri: self.client.uri().to_owned(), words })
            }
        };
        match sent {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_once_that_there_are_failures() {
        let (disk, server) = (true, false);
        for (label, failures, said) in [
            ("a server that is away", &[server, server, server][..], &[true, false, false][..]),
            ("a file that was replaced while it was read", &[disk], &[false]),
            ("a disk that cannot be read", &[disk, disk, disk], &[false, true, false]),
            ("first the disk, then the server", &[disk, server, disk], &[false, true, false]),
        ] {
            let mut outage = Outage::default();
            let (says, pauses): (Vec<_>, Vec<_>) = failures.iter().map(|may_pass| outage.fails(*may_pass)).unzip();
            assert_eq!(says, said, "{label}");
            let pauses: Vec<_> = pauses.iter().map(Duration::as_secs).collect();
            assert_eq!(pauses, [1, 2, 4][..failures.len()], "{label}");
            assert_eq!((outage.ends(), outage.ends()), (said.contains(&true), false), "{label}");
        }
        let mut outage = Outage::default();
        let pauses: Vec<_> = (0..99).map(|_| outage.fails(false).1).collect();
        assert_eq!(pauses.last(), Some(&LONGEST_RETRY));
    }

    #[tokio::test]
    async fn the_end_of_the_process_is_heard_also_if_nobody_says_it() {
        let (ends, mut ending) = watch::channel(None);
        ends.send_replace(Some(Ending::Stopped));
        assert_eq!(ended(&mut ending).await, Ending::Stopped);
        let (ends, mut ending) = watch::channel(None);
        drop(ends);
        assert_eq!(ended(&mut ending).await, Ending::Failed);
    }
}
