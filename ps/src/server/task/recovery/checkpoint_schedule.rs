//! The checkpoints that server 0 requests from all servers, and the model at the end.

mod manifest;

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use psjobs_api::training::ConsistencyMode;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::client::client;
use super::confirmed_commit::{check_concluded, not_committed, remove_old};
use super::extent::{Extent, extent};
use super::folder_lock::FolderLock;
use super::server_checkpoint;
use crate::batch::assigner::Position;
use crate::checkpoint::format::{FORMAT, PartEntry};
use crate::checkpoint::runs::Ancestor;
use crate::checkpoint::{Checkpoint, CheckpointId, Concluded, Manifest, Runs, export, write};
use crate::proto;
use crate::retry::{Retries, Schedule};
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::recovery::LastCheckpoint;

/// Pause between two attempts at the last checkpoint.
const PAUSE: Duration = Duration::from_millis(200);
/// Steps ahead of the current one for which a synchronous checkpoint is asked: time for the question to
/// reach every server before the step does.
const AHEAD: u64 = 2;
/// How long the last checkpoint is attempted; the other servers wait somewhat longer.
const LAST_TRIES: Duration = Duration::from_secs(20);
/// How long a server 0 that is asked to stop waits for the steps that the others make without it.
const NEXT_STEPS: Duration = Duration::from_secs(5);
/// Timeout for telling the other servers that they can end.
const RELEASE: Duration = Duration::from_secs(2);

/// The version that a checkpoint holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// In Sync a future step, so that training need not wait, or the first values before any step.
    Soon,
    /// The current one: no round can close meanwhile, because a trainer has concluded. In Sync the layers that trainers
    /// train themselves are waited for: they come a moment after the rows of the step.
    Now,
    /// The current one, as it is: training has ended.
    Last,
}

/// A manifest on its way to the disk. It gets there even if no task waits for it.
struct Committing {
    id: CheckpointId,
    /// The state that counts as kept with it.
    kept: Kept,
    /// The checkpoint was complete before; only its manifest is replaced.
    was_complete: bool,
    writing: JoinHandle<Result<LastCheckpoint, Status>>,
}

/// The state in the newest checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// How far training had come in it on every server; `None` if that differs or is not known.
    pub extent: Option<Extent>,
    /// The trainers that had concluded in it.
    pub concluded: Concluded,
    /// The batches of an elastic job that were done in it; `None` if that is not known.
    pub done: Option<u64>,
}

/// Writes the checkpoints of a job.
pub(super) struct CheckpointSchedule<'a> {
    state: &'a Arc<ServerState>,
    config: &'a CheckpointConfig,
    lock: &'a FolderLock<'a>,
    /// The run of the job, and its lineage.
    pub place: Option<(u32, Vec<Ancestor>)>,
    /// The manifest that is being written, if its end was not waited for.
    committing: Option<Committing>,
    /// A checkpoint whose manifest may be there although writing it failed, with the state that it holds.
    unsure: Option<(CheckpointId, Kept)>,
    /// Steps between the current step and that of a synchronous checkpoint; grows when requests arrive too late, and
    /// shrinks again by one with each checkpoint.
    margin: u64,
    /// The state in the last checkpoint.
    pub kept: Option<Kept>,
}

impl<'a> CheckpointSchedule<'a> {
    pub(super) fn new(state: &'a Arc<ServerState>, config: &'a CheckpointConfig, lock: &'a FolderLock<'a>) -> Self {
        Self { state, config, lock, place: None, committing: None, unsure: None, margin: AHEAD, kept: None }
    }

    /// Writes the last checkpoint, waiting for servers that do not answer; false if there is no state yet that a checkpoint
    /// could hold.
    ///
    /// # Errors
    /// The reason, if the last state is in no checkpoint.
    pub(super) async fn keep_last(&mut self) -> Result<bool, String> {
        if self.others_go_on() {
            let before = extent(self.state).await;
            if self.keep_a_step_to_come().await {
                return Ok(true);
            }
            // Parts that are written as they are would be of different steps. The checkpoint before is of one.
            if extent(self.state).await != before {
                return Ok(false);
            }
        }
        let mut retries = Retries::new(Schedule::every(PAUSE).within(LAST_TRIES));
        while let Err(status) = self.keep(When::Last).await {
            if status.code() == Code::FailedPrecondition {
                return Ok(false);
            }
            if self.find_whole().await {
                return Ok(true);
            }
            if !retries.pause().await {
                let why = status.message();
                tracing::error!(reason = why, "the last checkpoint could not be written");
                return if self.settle_for_newest().await { Ok(true) } else { Err(why.to_owned()) };
            }
        }
        Ok(true)
    }

    /// Returns whether the trainers go on without this server, and in step: where blocks are held twice, nothing holds them.
    fn others_go_on(&self) -> bool {
        let members = self.state.members();
        let are_at_work = members.active() && !members.done() && members.concluded().is_empty();
        let sync = self.state.config.training.consistency.mode == ConsistencyMode::Sync;
        self.state.replication.is_some() && sync && are_at_work
    }

    /// Writes a checkpoint of a step that the trainers are about to make; false if they do not make it soon.
    async fn keep_a_step_to_come(&mut self) -> bool {
        let mut retries = Retries::new(Schedule::every(PAUSE).within(NEXT_STEPS));
        let trying = async {
            while let Err(status) = self.keep(When::Soon).await {
                tracing::debug!(reason = status.message(), "the next steps are in no checkpoint yet");
                if !retries.pause().await {
                    return false;
                }
            }
            true
        };
        let is_kept = tokio::time::timeout(NEXT_STEPS, trying).await.unwrap_or(false);
        // The manifest may be on its way.
        is_kept || matches!(self.settle().await, Ok(true))
    }

    /// Makes the newest checkpoint the last one of an elastic job whose last trainers were lost: it has every step of the
    /// finished trainers. A server that misses the end of the job finds in it that the job is done. Returns whether it is
    /// so.
    pub(super) async fn settle_for_newest(&mut self) -> bool {
        let (concluded, done) = {
            let members = self.state.members();
            (members.concluded(), members.done())
        };
        let elastic = self.state.config.min_trainers.is_some();
        let run = self.place.as_ref().map(|(run, _)| *run);
        let newest = self.state.recovery.newest().filter(|newest| elastic && done && Some(newest.id.run) == run);
        let Some(newest) = newest else { return false };
        let (folder, last) = (newest.path.clone(), concluded.clone());
        let settled = self.config.folder.disk().work(move || {
            let manifest = Checkpoint::open(&folder).ok()?.manifest().clone();
            write::amend(&folder, &Manifest { concluded: last, ..manifest }).ok()
        });
        let settled = settled.await.is_some();
        if settled {
            self.kept = Some(Kept { extent: None, concluded, done: None });
        }
        settled
    }

    /// Notifies the other servers that they can end. A server that misses the message ends somewhat later.
    pub(super) async fn release(&self) {
        let request = proto::SnapshotRequest {
            job_uid: self.state.config.job_uid.clone(),
            epoch: self.state.recovery.epoch(),
            last: true,
            leader: self.state.config.incarnation,
            done: self.state.members().done(),
            ..proto::SnapshotRequest::default()
        };
        let calls = self.config.servers.iter().skip(1).map(|address| {
            let request = request.clone();
            async move { client(&self.state.config.network, address)?.snapshot(request).await.map(drop) }
        });
        if tokio::time::timeout(RELEASE, join_all(calls)).await.is_err() {
            tracing::debug!("not every server has heard that it can end");
        }
    }

    /// Has every server write its part, and marks the checkpoint as complete. Returns false if nothing has happened since the
    /// newest one, so that none was written.
    pub(super) async fn keep(&mut self, when: When) -> Result<bool, Status> {
        let started = Instant::now();
        let has_settled = self.settle().await? || self.finish_unsure().await?;
        let (state, config) = (self.state, self.config);
        if state.store().is_err() {
            return Err(Status::failed_precondition("no trainer has joined yet"));
        }
        // What is known to be done now is in what is written later.
        let (dealt, done) = self.dealt();
        let none = || Status::failed_precondition("not all blocks have values");
        let now = extent(state).await.ok_or_else(none)?;
        let sync = state.config.training.consistency.mode == ConsistencyMode::Sync;
        // Trainers with layers of their own keep in step, and give those for a step that is named.
        let tables = state.tables_beside_own_layers();
        let soon = (sync || tables.is_some()) && when == When::Soon && now.steps > 0;
        // When trainer 0 has left, no layers come that are newer than those that are there.
        let gives_layers = !state.members().finished().contains(&0);
        let version = match when {
            _ if soon => Some(now.steps + self.margin),
            // Some blocks may have the first step already, others not.
            When::Soon if sync => Some(0),
            When::Now if sync && tables.is_some() && gives_layers => Some(now.steps),
            _ => None,
        };
        let concluded = state.members().concluded();
        let all = concluded.len() == state.config.trainers as usize;
        let (given, held) = (state.members().most_claimed(), now.steps);
        if sync && given > held {
            let text =
                format!("trainers have given {given} steps, and server 0, which is yet to copy them, has {held}");
            return Err(Status::unavailable(text));
        }
        // In an elastic job the furthest trainer may have left, so that the others make steps behind it.
        let unchanged =
            |kept: &Kept| kept.extent == Some(now) && (state.batch_assignments.is_none() || kept.done == Some(done));
        let unchanged = self.kept.as_ref().is_some_and(unchanged);
        let same = self.kept.as_ref().is_some_and(|kept| kept.concluded == concluded);
        // Where it has every step of every trainer, nothing can follow, and others may have ended.
        let is_last = same && all && state.config.min_trainers.is_none();
        if is_last || (same && unchanged && (all || when == When::Soon)) {
            state.members().kept(&concluded);
            return Ok(has_settled); // Nothing has happened since.
        }
        let Some((run, lineage)) = self.place.clone() else {
            return Err(Status::failed_precondition("the servers have not gone to a checkpoint yet"));
        };
        let newest = state.recovery.newest().map(|newest| newest.id);
        // In Sync with all trainers the state of a step is what it is. Otherwise it is another one, which must not come
        // into the folder of one that is complete; layers of trainers may be newer than in the one before.
        let lockstep =
            sync && state.config.min_trainers.is_none() && state.config.training.consistency.backup_trainers == 0;
        let repeated = lockstep && tables.is_none();
        let taken = newest.filter(|_| !repeated).map_or(0, |newest| newest.step + 1);
        let mut id = CheckpointId { run, step: version.unwrap_or(now.steps).max(taken) };
        // Trainers have concluded since, and that is all: no other server is needed, which may have ended.
        let only_concluded = lockstep && unchanged && when != When::Soon;
        if let Some(newest) = newest.filter(|newest| *newest == id || (only_concluded && newest.run == run)) {
            if self.may_amend(newest, tables.is_some()).await? {
                return self.add_concluded(newest, Kept { extent: Some(now), concluded, done: Some(done) }).await;
            }
            id.step = id.step.max(newest.step + 1);
        }
        // A process that was replaced lets no server write into a checkpoint of its successor.
        self.must_hold_lock().await?;
        let epoch = state.recovery.epoch();
        let request = proto::SnapshotRequest {
            job_uid: state.config.job_uid.clone(),
            epoch,
            step: id.step,
            version,
            last: false,
            done: false,
            run,
            shard: None,
            leader: state.config.incarnation,
            // Where blocks are held twice, the others go on without server 0.
            hold: when == When::Last && !state.members().done() && state.replication.is_none(),
        };
        let parts = (0..config.servers.len() as u32).map(|shard| self.part(shard, &request));
        // Each server waits for the step without a limit, and for its disk with one. The network finds a server that is gone.
        let parts = match try_join_all(parts).await {
            Ok(parts) => parts,
            Err(status) => {
                match status.code() {
                    // The request came too late: the next one names a later step.
                    Code::OutOfRange => self.margin = (self.margin * 2).min(64),
                    // The process of server 0 before completed it after this one had looked for the newest.
                    Code::AlreadyExists => self.find_newest(run).await,
                    _ => {}
                }
                return Err(status);
            }
        };
        let (parts, rows): (Vec<_>, Vec<_>) = parts.into_iter().map(|reply| (reply.part, reply.rows)).unzip();
        let files =
            |files: Vec<Option<proto::CheckpointFile>>| files.into_iter().flatten().map(PartEntry::from).collect();
        let (parts, rows): (Vec<_>, Vec<_>) = (files(parts), files(rows));
        if !rows.is_empty() && rows.len() < parts.len() {
            return Err(Status::failed_precondition("not all servers have heard of the tables"));
        }
        let extent = Some(version.map_or(now, |version| Extent::at(state, version)));
        let kept = Kept { extent, concluded: concluded.clone(), done: Some(done) };
        let job = state.config.job_uid.clone();
        let manifest = Manifest { format: FORMAT, job, step: id.step, parts, rows, concluded, dealt };
        self.may_commit(epoch).await?;
        let (runs, keep, path) = (Runs::new(&config.folder), config.keep, Runs::new(&config.folder).path(id));
        // The rounds of a job with backup trainers close without some gradients.
        let has_all = state.replication.is_some()
            && state.config.min_trainers.is_none()
            && state.config.training.consistency.backup_trainers == 0;
        let commit = {
            let path = path.clone();
            move || {
                if has_all && !manifest.concluded.is_empty() {
                    let opened = Checkpoint::open_parts(path.clone(), manifest.clone());
                    let checkpoint = opened.map_err(|damage| Status::internal(damage.to_string()))?;
                    check_concluded(&checkpoint.steps_held(), &manifest.concluded)?;
                }
                write::commit(&path, &manifest).map_err(not_committed)?;
                Ok(LastCheckpoint::complete(id, path))
            }
        };
        let tidy = move || remove_old(&runs, &lineage, keep, id);
        self.begin_commit(id, kept, false, commit, tidy);
        self.settle().await?;
        if soon {
            self.margin = (self.margin - 1).max(AHEAD);
        }
        let step = id.step;
        tracing::info!(step, path = %path.display(), seconds = started.elapsed().as_secs_f64(), "wrote a checkpoint");
        Ok(true)
    }

    /// Records that the servers hold the newest checkpoint and nothing that came after it, if its `extents` on all of them
    /// are one.
    pub(super) fn hold_newest(&mut self, extents: Vec<Extent>) {
        let (first, (_, done)) = (extents.first().copied(), self.dealt());
        if let Some(kept) = &mut self.kept {
            kept.done = Some(done);
            kept.extent = first.filter(|first| extents.iter().all(|extent| extent == first));
        }
    }

    /// Returns what an elastic job has assigned of its batches, and how many of them are done.
    fn dealt(&self) -> (Position, u64) {
        let Some(batch_assignments) = &self.state.batch_assignments else { return Default::default() };
        let assigner = batch_assignments.assigner();
        (assigner.position(), assigner.done())
    }

    /// Looks for a checkpoint that has every step of every trainer: the process of server 0 before may have written it after
    /// this one had looked for the newest, and the others may have ended with it.
    async fn find_whole(&mut self) -> bool {
        let run = self.place.as_ref().map(|(run, _)| *run).filter(|_| self.state.config.min_trainers.is_none());
        let whole = server_checkpoint::whole(self.state, self.config).await;
        let (Some(run), Some((_, concluded))) = (run, whole) else { return false };
        if concluded != self.state.members().concluded() {
            return false;
        }
        self.find_newest(run).await;
        self.kept = Some(Kept { extent: None, concluded, done: None });
        true
    }

    /// Takes the newest complete checkpoint of `run` for the last one that was written, if there is a newer one than that.
    async fn find_newest(&self, run: u32) {
        let catalog = Runs::new(&self.config.folder).catalog(run);
        let found = self.config.folder.disk().work(move || catalog.complete().ok()?.last().copied());
        let known = self.state.recovery.newest().map(|newest| newest.id);
        if let Some(step) = found.await
            && known.is_none_or(|known| known.run != run || known.step < step)
        {
            self.set_newest(CheckpointId { run, step }).await;
        }
    }

    /// Takes a complete checkpoint for the last one that was written.
    pub(super) async fn set_newest(&self, id: CheckpointId) {
        let path = Runs::new(&self.config.folder).path(id);
        let newest = self.config.folder.disk().work(move || LastCheckpoint::complete(id, path));
        self.state.recovery.set_newest(newest.await);
    }

    /// Has the server that leads `shard` write its part.
    async fn part(&self, shard: u32, request: &proto::SnapshotRequest) -> Result<proto::SnapshotReply, Status> {
        let (mut refused, mut holders) = (None, self.state.holders(shard));
        // Another holder that has not heard yet that it leads no more takes a while to find that out.
        if self.state.shard(Some(shard)).is_ok() {
            holders.sort_by_key(|server| *server != self.state.config.index);
        }
        let request = proto::SnapshotRequest { shard: Some(shard), ..request.clone() };
        for server in holders {
            let address = &self.config.servers[server as usize];
            let status = match client(&self.state.config.network, address)?.snapshot(request.clone()).await {
                Ok(reply) => return Ok(reply.into_inner()),
                Err(status) => status,
            };
            // Servers of one job fail alike: the sentence says which one it is.
            let text = format!("server {server} did not write the part of server {shard}: {}", status.message());
            let named = Status::new(status.code(), text);
            if named.code() != Code::Unavailable {
                return Err(named);
            }
            refused.get_or_insert(named);
        }
        Err(refused.unwrap_or_else(|| Status::internal("a shard has no holder")))
    }

    /// Writes the model, from the last checkpoint, if every trainer has finished and all of it is there. Tries for as long
    /// as the last checkpoint is tried.
    ///
    /// # Errors
    /// If it cannot be written; the checkpoint holds it.
    pub(super) async fn export(&self) -> Result<(), ServerError> {
        let mut retries = Retries::new(Schedule::every(PAUSE).within(LAST_TRIES));
        let mut warned = false;
        while let Err(error) = self.try_export().await {
            if !std::mem::replace(&mut warned, true) {
                tracing::warn!(%error, "trying again");
            }
            if !retries.pause().await {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns whether the last checkpoint has every step of every trainer.
    pub(super) fn is_whole(&self) -> bool {
        let trainers = self.state.config.trainers as usize;
        self.kept.as_ref().is_some_and(|kept| kept.concluded.len() == trainers)
    }

    async fn try_export(&self) -> Result<(), ServerError> {
        // Without a model, or before the end, there is nothing to write. A trainer that comes back meanwhile changes nothing.
        let is_over = self.is_whole() || self.state.members().done();
        if !is_over || self.state.store().is_err() {
            return Ok(());
        }
        let Some(newest) = self.state.recovery.newest().filter(|_| self.is_whole()) else {
            let why = "no checkpoint holds the last step of every trainer".to_owned();
            return Err(ServerError::NotKept { what: "the model", why });
        };
        let (folder, checkpoint) = (self.config.folder.clone(), newest.path.clone());
        let exported = self.config.folder.disk().work(move || {
            let checkpoint = Checkpoint::open(&newest.path).map_err(export::ExportError::from)?;
            export::export_tables(&checkpoint, &folder)?;
            export::export(&checkpoint, folder)
        });
        let path = exported.await.map_err(|error| ServerError::NotKept {
            what: "the model",
            why: format!("{error}; the checkpoint in {} holds it", checkpoint.display()),
        })?;
        tracing::info!(path = %path.display(), "wrote the model");
        // Only one task leads, and it ends with this.
        let _ = self.state.recovery.model.set(path);
        Ok(())
    }
}
