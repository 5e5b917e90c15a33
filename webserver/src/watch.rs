//! Writes the jobs of the cluster and the records of those that are over to the board, and has records made.

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
use crate::records::Records;
use crate::tails;

/// How often old records are looked for.
const SWEEP: Duration = Duration::from_secs(3600);

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
    work: JoinSet<Done>,
    swept: Option<Instant>,
}

/// Work that is done.
enum Done {
    Read(Id, String, Tails),
    Written(Id, String),
    Failed(Id, String, Box<(Entry, Subject)>),
    /// The names of the jobs whose records are gone.
    Swept(Vec<String>),
}

impl Watch {
    /// Watches for ever.
    ///
    /// # Errors
    /// If the records cannot be read.
    pub async fn run(self) -> std::io::Result<()> {
        for key in self.records.load().await? {
            show_record(&self.board, &self.records, &key);
        }
        let (client, scope) = (self.client.clone(), self.scope.clone());
        let mut running = Running { watch: self, recorder: Recorder::default(), work: JoinSet::new(), swept: None };
        follow(&client, &scope, |jobs| running.tick(jobs)).await;
        Ok(())
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
        for due in self.recorder.due(Instant::now()) {
            self.write(due, jobs);
        }
        if self.watch.records.are_kept() && self.swept.is_none_or(|swept| swept.elapsed() >= SWEEP) {
            self.swept = Some(Instant::now());
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
            Done::Failed(id, uid, last) => self.recorder.failed(&id, &uid, *last, Instant::now()),
            Done::Swept(keys) => {
                for key in keys {
                    // One that the cluster still has is shown as it is there.
                    if let Some((namespace, name)) = key.split_once('/') {
                        self.show(&Id { namespace: namespace.to_owned(), name: name.to_owned() }, jobs);
                    }
                }
            }
        }
    }

    /// Shows a job: by its record, if it has one, else as the cluster has it.
    fn show(&mut self, id: &Id, jobs: &mut Jobs) {
        let Watch { board, records, .. } = &self.watch;
        let key = id.to_string();
        let uid = jobs.job(id).map(|job| job.metadata.uid.clone().unwrap_or_default());
        // Its last state is in the record of a job that was deleted, or replaced by another one of its name.
        if let Some(pending) = self.recorder.pending(id).map(str::to_owned)
            && uid.as_ref() != Some(&pending)
            && let Some((job, curves)) = board.job(&key)
        {
            self.recorder.deleted(id, subject(id, pending, job, curves));
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
        if records.are_kept() && status.and_then(|status| status.phase).is_some_and(Phase::is_final) {
            self.recorder.ended(id, &uid, (json!(job.spec), json!(status)), Instant::now());
        }
    }

    fn write(&mut self, due: Due, jobs: &Jobs) {
        let Due { id, uid, tails, object, last } = due;
        let is_there = jobs.job(&id).is_some_and(|job| job.metadata.uid.as_deref() == Some(uid.as_str()));
        let shown = self.watch.board.job(&id.to_string()).filter(|_| is_there);
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
