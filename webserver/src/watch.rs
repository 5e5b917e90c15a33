//! Writes the jobs of the cluster and the records of those that are over to the board, and has records made.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use kubectl_psjob::web::follow::{Scope, follow};
use kubectl_psjob::web::jobs::{Id, Jobs, Naming};
use psjobs_api::crd::Phase;
use psjobs_web::curves::Curves;
use psjobs_web::job::{Job, Line};
use psjobs_web::{Board, now};
use serde_json::json;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::record::{Entry, Subject, text};
use crate::recorder::{Due, Recorder, Tails};
use crate::records::{Loaded, Records};
use crate::series::Series;
use crate::tails;
use crate::trainers::Asking;

/// How often old records are looked for.
const SWEEP: Duration = Duration::from_secs(3600);
/// Time after which records that could not be read are tried again.
const RELOAD: Duration = Duration::from_secs(30);

/// The jobs, and what is under way for them.
pub struct Watch {
    pub client: Client,
    pub scope: Scope,
    pub board: Arc<Board>,
    pub records: Arc<Records>,
    /// Time for which records are kept.
    pub keep: Duration,
    pub ready: Arc<AtomicBool>,
}

/// The state of [`Watch::run`].
struct Running {
    watch: Watch,
    recorder: Recorder,
    asking: Asking,
    series: Series,
    work: JoinSet<Done>,
    /// The time to read the records, unless all are read.
    load: Option<Instant>,
    /// It is known which records there are. Until then none is written: it would replace a better one.
    is_loaded: bool,
    swept: Option<Instant>,
    /// Records are being read or removed: one at a time, so that none is found that is just being removed.
    is_busy: bool,
}

/// Work that is done.
enum Done {
    Read(Id, String, Tails),
    Written(Id, String),
    Failed(Id, String, Box<(Entry, Subject)>),
    Loaded(io::Result<Loaded>),
    /// The names of the jobs whose records are gone.
    Swept(Vec<String>),
}

impl Watch {
    /// Watches for ever. Records that cannot be read are tried again, and the jobs of the cluster are shown meanwhile.
    pub async fn run(self) {
        let (client, scope) = (self.client.clone(), self.scope.clone());
        let mut running = Running {
            load: self.records.are_kept().then(Instant::now),
            asking: Asking::new(self.board.clone()),
            series: Series::new(self.board.clone()),
            watch: self,
            recorder: Recorder::default(),
            work: JoinSet::new(),
            is_loaded: false,
            swept: None,
            is_busy: false,
        };
        follow(&client, &scope, |jobs| running.tick(jobs)).await;
    }
}

impl Running {
    fn tick(&mut self, jobs: &mut Jobs) {
        while let Some(done) = self.work.try_join_next() {
            match done {
                Ok(done) => self.take(done, jobs),
                Err(error) => warn!("work for a record ended early: {error}"),
            }
        }
        for id in jobs.changed() {
            self.show(&id, jobs);
        }
        self.asking.tick(jobs, Instant::now());
        self.series.tick(jobs, Instant::now());
        if !self.is_busy && self.load.is_some_and(|from| from <= Instant::now()) {
            self.is_busy = true;
            let records = self.watch.records.clone();
            self.work.spawn(async move { Done::Loaded(records.load().await) });
        }
        if !jobs.is_complete() {
            return;
        }
        self.watch.ready.store(true, Ordering::Relaxed);
        for (id, uid) in self.recorder.to_read() {
            let (api, pods) = (Api::<Pod>::namespaced(self.watch.client.clone(), &id.namespace), jobs.pods(&id));
            self.work.spawn(async move {
                let tails = tails::read(&api, pods).await;
                Done::Read(id, uid, tails)
            });
        }
        if !self.is_loaded {
            return;
        }
        for due in self.recorder.due(Instant::now()) {
            self.write(due, jobs);
        }
        if !self.is_busy && self.swept.is_none_or(|swept| swept.elapsed() >= SWEEP) {
            (self.is_busy, self.swept) = (true, Some(Instant::now()));
            let (records, keep) = (self.watch.records.clone(), self.watch.keep);
            self.work.spawn(async move {
                let than = now().saturating_sub(u64::try_from(keep.as_millis()).unwrap_or(u64::MAX));
                Done::Swept(records.remove_older(than).await)
            });
        }
    }

    fn take(&mut self, done: Done, jobs: &mut Jobs) {
        match done {
            Done::Read(id, uid, tails) => self.recorder.read(&id, &uid, tails),
            Done::Written(id, uid) => {
                info!("{id} is over and recorded");
                self.recorder.written(&id, &uid);
                self.show(&id, jobs);
            }
            Done::Failed(id, uid, last) => {
                let (entry, mut subject) = *last;
                let tails = std::mem::take(&mut subject.tails);
                // The board has one that is still there.
                let last = (!has(jobs, &id, &uid)).then_some((entry, subject));
                self.recorder.failed(&id, &uid, tails, last, Instant::now());
            }
            Done::Loaded(Ok(Loaded { keys, unread })) => {
                self.is_busy = false;
                self.load = (unread > 0).then(|| Instant::now() + RELOAD);
                self.is_loaded = true;
                let records = self.watch.records.clone();
                self.recorder.forget(|id, uid| records.has(&id.to_string(), uid));
                self.show_all(&keys, jobs);
            }
            Done::Loaded(Err(error)) => {
                self.is_busy = false;
                self.load = Some(Instant::now() + RELOAD);
                warn!("the records cannot be read, and are tried again: {error}; --records names their folder");
            }
            Done::Swept(keys) => {
                self.is_busy = false;
                self.show_all(&keys, jobs);
            }
        }
    }

    /// Shows the jobs of these names. One that the cluster has is shown as it is there.
    fn show_all(&mut self, keys: &[String], jobs: &mut Jobs) {
        for (namespace, name) in keys.iter().filter_map(|key| key.split_once('/')) {
            self.show(&Id { namespace: namespace.to_owned(), name: name.to_owned() }, jobs);
        }
    }

    /// Shows a job: by its record, if it has one, else as the cluster has it.
    fn show(&mut self, id: &Id, jobs: &mut Jobs) {
        self.series.see(id, jobs.job(id), Instant::now());
        let Watch { board, records, .. } = &self.watch;
        let key = id.to_string();
        let uid = jobs.job(id).map(|job| job.metadata.uid.clone().unwrap_or_default());
        // Its last state is in the record of a job that was deleted, or replaced by another one of its name.
        if let Some(pending) = self.recorder.pending(id).map(str::to_owned)
            && uid.as_ref() != Some(&pending)
            && let Some((job, curves)) = board.job(&key)
            && !self.recorder.deleted(id, subject(id, pending, job, curves))
        {
            warn!("{id} was deleted and gets no record: too many others wait for theirs; the warnings before say why");
        }
        records.see(&key, uid.as_deref());
        if records.find(&key).is_some() && uid.is_some() {
            show_record(board, records, &key);
            return;
        }
        jobs.show(id, &Naming::Cluster, board, Timestamp::now());
        show_record(board, records, &key);
        let Some((job, uid)) = jobs.job(id).zip(uid) else { return };
        let status = job.status.as_ref();
        let is_final = status.and_then(|status| status.phase).is_some_and(Phase::is_final);
        if records.are_kept() && is_final && !records.has(&key, &uid) {
            self.recorder.ended(id, &uid, (json!(job.spec), json!(status)), Instant::now());
        }
    }

    fn write(&mut self, due: Due, jobs: &Jobs) {
        let Due { id, uid, tails, object, last } = due;
        let shown = self.watch.board.job(&id.to_string()).filter(|_| has(jobs, &id, &uid));
        let last = last.or_else(|| shown.map(|(job, curves)| subject(&id, uid.clone(), job, curves)));
        let Some((entry, mut subject)) = last else {
            warn!("{id} was gone before its record could be made");
            self.recorder.written(&id, &uid);
            return;
        };
        (subject.spec, subject.status) = object;
        subject.tails = tails;
        let records = self.watch.records.clone();
        self.work.spawn(async move {
            match records.write(&entry, text(&entry, &subject)).await {
                Ok(()) => Done::Written(id, uid),
                Err(error) => {
                    warn!("the record of {id} cannot be written, and is tried again: {error}");
                    Done::Failed(id, uid, Box::new((entry, subject)))
                }
            }
        });
    }
}

/// Says if the cluster has this very job.
fn has(jobs: &Jobs, id: &Id, uid: &str) -> bool {
    jobs.job(id).is_some_and(|job| job.metadata.uid.as_deref() == Some(uid))
}

/// Returns what is kept of a job as the page shows it, without its object and logs.
fn subject(id: &Id, uid: String, job: Job, curves: Curves) -> (Entry, Subject) {
    let entry = Entry {
        namespace: id.namespace.clone(),
        name: id.name.clone(),
        uid,
        ended: job.ended.unwrap_or_else(now),
        line: Line::from(&job),
    };
    (entry, Subject { job, curves, ..Subject::default() })
}

/// Puts the line of a job's record on the board, if a record stands for the job.
fn show_record(board: &Board, records: &Records, key: &str) {
    let Some(entry) = records.find(key) else { return };
    board.change(key, |job, curves| {
        *job = Job { name: entry.name.clone(), ..Job::from(&entry.line) };
        *curves = Curves::default();
    });
}
