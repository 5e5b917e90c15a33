//! What server 0 does for the job: brings every server that starts to one state, has checkpoints
//! written as time passes, and the last one and the model when training has ended.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::{join_all, try_join_all};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};

use psjobs_api::training::ConsistencyMode;

use super::part::on_disk;
use super::{CheckpointConfig, Conclusion, LastCheckpoint};
use crate::checkpoint::format::{FORMAT, PartEntry};
use crate::checkpoint::{Catalog, Checkpoint, Manifest, export, write};
use crate::network::Network;
use crate::proto;
use crate::proto::recovery_client::RecoveryClient;
use crate::server::ServerError;
use crate::server::shared::Shared;

/// Pause between two tries to reach a server.
const PAUSE: Duration = Duration::from_millis(200);
/// After this long without an answer the log says who is waited for, again and again.
const QUIET: Duration = Duration::from_secs(10);
/// A checkpoint that is not written by then is given up; the next one follows.
const WRITE: Duration = Duration::from_secs(120);
/// How long the last checkpoint is tried; the other servers wait for it somewhat longer.
const LAST_TRIES: Duration = Duration::from_secs(20);
/// How long the other servers may take to hear that they can end.
const RELEASE: Duration = Duration::from_secs(2);
/// How soon it is looked again whether there is something to keep.
const SOON: Duration = Duration::from_millis(250);
/// Steps ahead of the current one for which a synchronous checkpoint is asked: time for the question to
/// reach every server before the step does.
const AHEAD: u64 = 2;

/// Leads until `training` ends, from the state that other servers have `given` to this one or from the newest
/// checkpoint, then writes the last checkpoint and the model.
///
/// # Errors
/// If there is a checkpoint that this job cannot go on from: beginning anew would overwrite it.
pub async fn lead(
    shared: &Arc<Shared>,
    config: &CheckpointConfig,
    given: bool,
    training: CancellationToken,
) -> Result<(), ServerError> {
    let mut arrivals = shared.recovery.arrivals();
    let mut leader = Leader { shared, config, instances: BTreeMap::new(), margin: AHEAD, kept: None };
    let mut conclusions = shared.recovery.conclusions();
    // Trainers that wait for a checkpoint of now.
    let mut concluding = Vec::new();
    let mut resume = config.resume;
    let mut ticks = tokio::time::interval(config.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if given {
        leader.take_over().await;
    } else if !leader.recover_before(&training, resume).await? {
        leader.export().await;
        return Ok(());
    }
    loop {
        // What this job has written is always its own to go on from.
        resume |= shared.recovery.newest().is_some();
        tokio::select! {
            biased;
            Some(newcomer) = arrivals.recv() => {
                if newcomer.given {
                    leader.instances.insert(newcomer.server, newcomer.instance);
                } else if leader.instances.get(&newcomer.server) != Some(&newcomer.instance) {
                    let server = newcomer.server;
                    tracing::warn!("server {server} has started anew; all servers go back to the newest checkpoint");
                    if !leader.recover_before(&training, resume).await? {
                        leader.export().await;
                        return Ok(());
                    }
                }
                // One that has died meanwhile asks again.
                let _ = newcomer.done.send(());
            }
            Some(conclusion) = conclusions.recv() => {
                concluding.push(conclusion);
                ticks.reset_immediately();
            }
            _ = ticks.tick() => {
                // Who concluded before the servers went back learns that it has to come again.
                concluding.retain(|conclusion: &Conclusion| conclusion.epoch == shared.recovery.epoch());
                let when = if concluding.is_empty() { When::Soon } else { When::Now };
                let waiting = concluding.len();
                let kept = tokio::select! {
                    biased;
                    kept = leader.keep(when) => kept,
                    // The step that was to be kept may never come.
                    Some(conclusion) = conclusions.recv(), if when == When::Soon => {
                        concluding.push(conclusion);
                        ticks.reset_immediately();
                        continue;
                    }
                    () = training.cancelled() => break,
                };
                let Err(status) = kept else {
                    // Who has gone away meanwhile asks again.
                    for conclusion in concluding.drain(..waiting) {
                        let _ = conclusion.kept.send(());
                    }
                    continue;
                };
                let early = matches!(status.code(), Code::FailedPrecondition | Code::OutOfRange);
                if early || when == When::Now {
                    ticks.reset_after(SOON);
                }
                if !early {
                    let reason = status.message();
                    tracing::warn!(reason, "no checkpoint was written; training goes on, the next try follows");
                }
            }
            () = training.cancelled() => break,
        }
    }
    leader.keep_last().await;
    leader.export().await;
    leader.release().await;
    Ok(())
}

/// What a checkpoint is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// In Sync a step to come, so that training need not wait.
    Soon,
    /// What there is: no round can close meanwhile, because training has ended or a trainer has concluded.
    Now,
}

struct Leader<'a> {
    shared: &'a Arc<Shared>,
    config: &'a CheckpointConfig,
    /// The process of each server that holds the current state.
    instances: BTreeMap<u32, u64>,
    margin: u64,
    /// Steps done and trainers that had concluded, at the last checkpoint.
    kept: Option<(u64, Vec<u32>)>,
}

impl Leader<'_> {
    /// As [`Leader::recover`], unless training ends first; whether it did not.
    async fn recover_before(&mut self, training: &CancellationToken, resume: bool) -> Result<bool, ServerError> {
        tokio::select! {
            biased;
            recovered = self.recover(resume) => recovered.map(|()| true),
            () = training.cancelled() => Ok(false),
        }
    }

    /// Brings all servers to the newest checkpoint that is whole, waiting for those that are away.
    async fn recover(&mut self, resume: bool) -> Result<(), ServerError> {
        let mut damaged = Vec::new();
        loop {
            let step = if resume { self.newest(&damaged).await } else { None };
            let epoch =
                SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |age| age.as_micros() as u64);
            let concluded = self.concluded_in(step).await;
            // Where all have, the others may be done and gone: the model can be written without them.
            self.kept = step.map(|step| (step, concluded.clone()));
            let request = proto::RestoreRequest { job_uid: self.shared.config.job_uid.clone(), epoch, step, concluded };
            let config = &self.shared.config;
            let restored =
                (0..).zip(&self.config.servers).map(|(server, address)| {
                    let request = request.clone();
                    async move {
                        restore(&config.network, server, address, request).await.map(|instance| (server, instance))
                    }
                });
            match try_join_all(restored).await {
                Ok(instances) => {
                    self.instances = instances.into_iter().collect();
                    return Ok(());
                }
                Err(status) if status.code() == Code::InvalidArgument => {
                    return Err(ServerError::Checkpoint(status.message().to_owned()));
                }
                Err(status) => {
                    tracing::error!(reason = status.message(), "a checkpoint cannot be used; trying the one before");
                    damaged.extend(step);
                }
            }
        }
    }

    /// Goes on where the process before this one was.
    async fn take_over(&mut self) {
        if let Some(step) = self.newest(&[]).await {
            let path = Catalog::new(&self.config.folder).path(step);
            self.shared.recovery.set_newest(on_disk(move || LastCheckpoint::complete(step, path)).await);
        }
    }

    /// Step of the newest complete checkpoint that is not in `damaged`. Whether it is whole its readers
    /// find out.
    async fn newest(&self, damaged: &[u64]) -> Option<u64> {
        let catalog = Catalog::new(&self.config.folder);
        let complete = on_disk(move || {
            catalog.complete().inspect_err(
                |error| tracing::error!(%error, folder = %catalog.folder().display(), "cannot look for checkpoints"),
            )
        });
        complete.await.unwrap_or_default().into_iter().rev().find(|step| !damaged.contains(step))
    }

    /// The trainers that had given all when the checkpoint of `step` was taken. A job that goes on from another one's
    /// checkpoint has work for all of its own. One that cannot be read is found to be damaged by who restores it.
    async fn concluded_in(&self, step: Option<u64>) -> Vec<u32> {
        let Some(step) = step else { return Vec::new() };
        let folder = Catalog::new(&self.config.folder).path(step);
        let uid = self.shared.config.job_uid.clone();
        let concluded = on_disk(move || {
            let checkpoint = Checkpoint::open(&folder).ok().filter(|checkpoint| checkpoint.description().job == uid);
            checkpoint.map(|checkpoint| checkpoint.concluded().to_vec())
        });
        concluded.await.unwrap_or_default()
    }

    /// Writes the last checkpoint, if there is anything to keep. A server that is away for a moment is waited for.
    async fn keep_last(&mut self) {
        let deadline = Instant::now() + LAST_TRIES;
        while let Err(status) = self.keep(When::Now).await {
            if status.code() == Code::FailedPrecondition {
                return;
            }
            if Instant::now() >= deadline {
                tracing::error!(reason = status.message(), "the last checkpoint could not be written");
                return self.settle_for_newest().await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Of an elastic job whose last trainers were lost: the newest checkpoint has every step of those who have finished,
    /// and becomes its last one. A server that is away sees in it that all is done.
    async fn settle_for_newest(&mut self) {
        let (concluded, done) = {
            let members = self.shared.members();
            (members.concluded(), members.done())
        };
        let elastic = self.shared.config.min_trainers.is_some();
        let Some(newest) = self.shared.recovery.newest().filter(|_| elastic && done) else { return };
        let (folder, last) = (newest.path.clone(), concluded.clone());
        let settled = on_disk(move || {
            let manifest = Checkpoint::open(&folder).ok()?.manifest().clone();
            write::commit(&folder, &Manifest { concluded: last, ..manifest }).ok()
        });
        if settled.await.is_some() {
            self.kept = Some((newest.step, concluded));
        }
    }

    /// Lets the other servers end. One that does not hear it ends somewhat later.
    async fn release(&self) {
        let request = proto::SnapshotRequest {
            job_uid: self.shared.config.job_uid.clone(),
            epoch: self.shared.recovery.epoch(),
            last: true,
            done: self.shared.members().done(),
            ..proto::SnapshotRequest::default()
        };
        let told = self.config.servers.iter().skip(1).map(|address| {
            let request = request.clone();
            async move { client(&self.shared.config.network, address)?.snapshot(request).await.map(drop) }
        });
        if tokio::time::timeout(RELEASE, join_all(told)).await.is_err() {
            tracing::debug!("not every server has heard that it can end");
        }
    }

    /// Has every server write its part, and marks the checkpoint as complete.
    async fn keep(&mut self, when: When) -> Result<(), Status> {
        let started = Instant::now();
        let (shared, config) = (self.shared, self.config);
        let Ok(store) = shared.store() else { return Err(Status::failed_precondition("no trainer has joined yet")) };
        // What is known to be done now is in what is written later.
        let dealt = shared.dealing.as_ref().map(|dealing| dealing.dealer().position()).unwrap_or_default();
        let progress = store.progress(shared.config.index).await;
        let Some(progress) = progress else { return Err(Status::failed_precondition("not all blocks have values")) };
        let sync = shared.config.training.consistency.mode == ConsistencyMode::Sync;
        let soon = sync && when == When::Soon && progress.version > 0;
        let version = soon.then_some(progress.version + self.margin);
        let now = if sync { progress.version } else { progress.step };
        let concluded = shared.members().concluded();
        let all = concluded.len() == shared.config.trainers as usize;
        if self.kept.as_ref() == Some(&(now, concluded.clone())) && (all || when == When::Soon) {
            return Ok(()); // Nothing has happened since.
        }
        let newest = shared.recovery.newest().map(|newest| newest.step);
        // In Sync with all trainers the state of a step is what it is, and is written again as it was. Otherwise it is
        // another one, which must not come into the folder of one that is complete.
        let repeated = sync && shared.config.min_trainers.is_none();
        let taken = newest.filter(|_| !repeated).map_or(0, |newest| newest + 1);
        let step = version.unwrap_or(now).max(taken);
        let done = newest == Some(step);
        let catalog = Catalog::new(&config.folder);
        if !done {
            let folder = catalog.path(step);
            on_disk(move || write::revoke(&folder)).await.map_err(internal)?;
        }
        let request = proto::SnapshotRequest {
            job_uid: shared.config.job_uid.clone(),
            epoch: shared.recovery.epoch(),
            step,
            version,
            last: false,
            done: false,
        };
        let parts =
            config.servers.iter().map(|address| {
                let request = request.clone();
                async move {
                    Ok::<_, Status>(client(&shared.config.network, address)?.snapshot(request).await?.into_inner())
                }
            });
        let parts = tokio::time::timeout(WRITE, try_join_all(parts)).await;
        let parts = parts.map_err(|_| Status::deadline_exceeded("a server did not write its part in time"))?;
        let parts = parts.inspect_err(|status| {
            // The question came too late: the next one is asked earlier.
            if status.code() == Code::OutOfRange {
                self.margin = (self.margin * 2).min(64);
            }
        })?;
        let parts = parts.into_iter().map(|p| PartEntry { file: p.file, bytes: p.bytes, crc32: p.crc32 }).collect();
        let (job, given_all) = (shared.config.job_uid.clone(), concluded.clone());
        let manifest = Manifest { format: FORMAT, job, step, parts, concluded: given_all, dealt };
        let (path, keep) = (catalog.path(step), config.keep);
        let newest = on_disk({
            let path = path.clone();
            move || {
                write::commit(&path, &manifest)?;
                if let Err(error) = catalog.prune(keep) {
                    tracing::warn!(%error, "old checkpoints could not be removed");
                }
                Ok(LastCheckpoint::complete(step, path))
            }
        })
        .await
        .map_err(internal)?;
        shared.recovery.set_newest(newest);
        self.kept = Some((if repeated { step } else { version.unwrap_or(now) }, concluded));
        tracing::info!(step, path = %path.display(), seconds = started.elapsed().as_secs_f64(), "wrote a checkpoint");
        Ok(())
    }

    /// Writes the model, from the last checkpoint, if every trainer has finished and all of it is there.
    async fn export(&self) {
        let trainers = self.shared.config.trainers as usize;
        let whole = self.kept.as_ref().is_some_and(|(_, concluded)| concluded.len() == trainers);
        let whole = whole && self.shared.members().done();
        let Some(newest) = self.shared.recovery.newest().filter(|_| whole) else { return };
        let folder: PathBuf = self.config.folder.clone();
        let exported = on_disk(move || {
            let checkpoint = Checkpoint::open(&newest.path).map_err(export::ExportError::from)?;
            export::export(&checkpoint, &folder)
        });
        match exported.await {
            Ok(path) => {
                tracing::info!(path = %path.display(), "wrote the model");
                // Only one task leads, and it ends with this.
                let _ = self.shared.recovery.model.set(path);
            }
            Err(error) => tracing::error!(%error, "the model could not be written; the checkpoint holds it"),
        }
    }
}

/// Restores one server, waiting for it if it is away; its instance.
async fn restore(network: &Network, server: u32, address: &str, request: proto::RestoreRequest) -> Result<u64, Status> {
    insist(&format!("server {server}"), || {
        let request = request.clone();
        async move {
            match client(network, address)?.restore(request).await {
                Ok(reply) => Ok(Ok(reply.into_inner().instance)),
                Err(status) if is_final(&status) => Ok(Err(status)),
                Err(status) => Err(status),
            }
        }
    })
    .await
}

/// Whether asking again would give the same answer.
fn is_final(status: &Status) -> bool {
    matches!(status.code(), Code::DataLoss | Code::InvalidArgument)
}

/// Tries until there is an answer.
pub(super) async fn insist<T, F: Future<Output = Result<T, Status>>>(who: &str, attempt: impl Fn() -> F) -> T {
    let mut told = Instant::now();
    loop {
        match attempt().await {
            Ok(answer) => return answer,
            Err(status) if told.elapsed() >= QUIET => {
                tracing::info!(reason = status.message(), "waiting for {who}");
                told = Instant::now();
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// A client that connects at its first call.
pub(super) fn client(network: &Network, address: &str) -> Result<RecoveryClient<Channel>, Status> {
    let endpoint = (network.endpoint(address))
        .map_err(|_| Status::invalid_argument(format!("{address:?} is not the address of a server")))?;
    Ok(RecoveryClient::new(network.connect_lazy(&endpoint.connect_timeout(Duration::from_secs(5)))))
}

fn internal(error: write::WriteError) -> Status {
    Status::internal(error.to_string())
}
