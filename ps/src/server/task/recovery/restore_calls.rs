//! Asks all servers to restore a checkpoint, in an epoch that none of them has heard of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::client::{client, retry_until_ok};
use super::extent::Extent;
use super::server_checkpoint;
use crate::checkpoint::format::MANIFEST;
use crate::checkpoint::{Folder, Runs};
use crate::client::is_of_another_job;
use crate::network::never_sent;
use crate::proto;
use crate::server::state::ServerState;

/// The answer of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The process `instance` has restored the checkpoint.
    Restored { instance: u64, extent: Option<Extent> },
    /// It may have restored the checkpoint before its answer got lost. Trainers may have begun there, so a process that
    /// takes its place must not be taken for it: all servers restore again, in a new epoch.
    Doubtful,
    /// It has heard of a greater epoch, and refuses.
    Refused { epoch: u64 },
}

impl Answer {
    /// Returns the process that has restored the checkpoint.
    pub fn instance(&self) -> Option<u64> {
        if let Self::Restored { instance, .. } = self { Some(*instance) } else { None }
    }

    /// Returns how far training has come there.
    pub fn extent(&self) -> Option<Extent> {
        if let Self::Restored { extent, .. } = self { *extent } else { None }
    }

    /// Returns the greater epoch that the server has heard of, else 0.
    pub fn epoch(&self) -> u64 {
        if let Self::Refused { epoch } = self { *epoch } else { 0 }
    }
}

/// Returns the epoch after the one `recorded` on disk and those `heard` of from servers, if there is one. No clock is
/// asked: a machine whose clock is behind would give an epoch that is over.
/// The upper half is at least the `incarnation` of this process of server 0: an epoch that a process before it records late is
/// smaller than all that this one gives.
pub(super) fn next_epoch(recorded: u64, heard: u64, incarnation: u32) -> Option<u64> {
    recorded.max(heard).max(u64::from(incarnation) << 32).checked_add(1)
}

/// One request to all servers.
pub(super) struct RestoreCalls<'a> {
    state: &'a Arc<ServerState>,
    servers: &'a [String],
    request: proto::RestoreRequest,
    /// The folder of the checkpoint, if there is one to restore.
    checkpoint: Option<Folder>,
    /// When each server was asked whose answer is awaited.
    asked: Mutex<BTreeMap<u32, Instant>>,
}

impl<'a> RestoreCalls<'a> {
    pub fn new(
        state: &'a Arc<ServerState>,
        servers: &'a [String],
        request: proto::RestoreRequest,
        checkpoint: Option<Folder>,
    ) -> Self {
        Self { state, servers, request, checkpoint, asked: Mutex::default() }
    }

    /// Returns how long ago a server was asked, if its answer is awaited.
    pub fn asked_for(&self, server: u32) -> Option<Duration> {
        self.asked.lock().get(&server).map(Instant::elapsed)
    }

    /// Asks one server, waiting for it if it is away or cannot read the checkpoint now.
    ///
    /// # Errors
    /// If the checkpoint is damaged, or of another job, or this process shows no certificate of a server; `NOT_FOUND` if the
    /// checkpoint was removed meanwhile.
    pub async fn restore(&self, server: u32) -> Result<Answer, Status> {
        let name = format!("server {server}");
        retry_until_ok(&name, || async {
            self.asked.lock().insert(server, Instant::now());
            let answered = self.attempt(server).await;
            self.asked.lock().remove(&server);
            match answered {
                Ok(proto::RestoreReply { instance, extent }) => {
                    Ok(Ok(Answer::Restored { instance, extent: extent.map(Extent::from) }))
                }
                Err(status) => match status.code() {
                    // It has got the address of a server that is being replaced.
                    Code::InvalidArgument if self.state.config.supervised && is_of_another_job(&status) => Err(status),
                    Code::DataLoss | Code::InvalidArgument | Code::PermissionDenied => Ok(Err(status)),
                    Code::Aborted => Ok(Ok(Answer::Refused { epoch: self.epoch_of(server).await? })),
                    Code::FailedPrecondition => {
                        if self.has_vanished().await {
                            return Ok(Err(Status::not_found("the checkpoint was removed meanwhile")));
                        }
                        if self.is_set_back().await {
                            tracing::info!(
                                "the record of the run is of an earlier epoch; all go to the checkpoint again"
                            );
                            return Ok(Ok(Answer::Doubtful));
                        }
                        if self.state.recovery.trouble().as_deref() != Some(status.message()) {
                            tracing::warn!(reason = status.message(), "waiting for {name}");
                            self.state.recovery.set_trouble(Some(status.message().to_owned()));
                        }
                        Err(status)
                    }
                    _ if never_sent(&status) => Err(status),
                    _ => Ok(Ok(Answer::Doubtful)),
                },
            }
        })
        .await
    }

    async fn attempt(&self, server: u32) -> Result<proto::RestoreReply, Status> {
        if server == self.state.config.index {
            // No answer can get lost on the way, so this server is restored also where the others are gone.
            return server_checkpoint::answer_restore(self.state, self.request.clone()).await;
        }
        let mut client = client(&self.state.config.network, &self.servers[server as usize])?;
        Ok(client.restore(self.request.clone()).await?.into_inner())
    }

    /// Returns whether an earlier epoch than that of the request is on record: a process of server 0 that was replaced has written
    /// it late, so that no server restores in this epoch.
    async fn is_set_back(&self) -> bool {
        let Some(config) = &self.state.config.checkpoint else { return false };
        let (runs, run) = (Runs::new(&config.folder), self.request.run);
        let recorded = config.folder.disk().work(move || runs.record(run)).await;
        matches!(recorded, Ok(Some(record)) if record.epoch < self.request.epoch)
    }

    /// Returns whether the manifest of the checkpoint is gone. One that cannot be looked for now may be there.
    async fn has_vanished(&self) -> bool {
        let Some(folder) = self.checkpoint.clone() else { return false };
        let disk = folder.disk().clone();
        let is_there = disk.work(move || folder.disk().exists(&folder.join(MANIFEST))).await;
        is_there.is_ok_and(|is_there| !is_there)
    }

    async fn epoch_of(&self, server: u32) -> Result<u64, Status> {
        Ok(epochs_of(self.state, &self.servers[server as usize]).await?.epoch)
    }
}

/// Returns the epoch of the server at `address`, and the greatest one that it has heard of. That server learns that server 0 is
/// at work.
pub(super) async fn epochs_of(state: &ServerState, address: &str) -> Result<proto::GetEpochReply, Status> {
    let request = proto::GetEpochRequest { job_uid: state.config.job_uid.clone(), leader: state.config.incarnation };
    Ok(client(&state.config.network, address)?.get_epoch(request).await?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_greater_than_all_that_were_recorded_or_heard_of() {
        for (recorded, heard, incarnation, want) in [
            (0, 0, 0, Some(1)),
            (7, 0, 0, Some(8)),
            (7, 0, 2, Some((2 << 32) + 1)),
            ((2 << 32) + 1, 0, 2, Some((2 << 32) + 2)),
            (6, (2 << 32) + 1, 3, Some((3 << 32) + 1)),
            ((5 << 32) + 9, 0, 3, Some((5 << 32) + 10)),
            // A server kept on running while the folder was exchanged, or gave epochs by its clock.
            (7, 1_764_000_000_000_000, 0, Some(1_764_000_000_000_001)),
            (u64::MAX - 1, 3, 4, Some(u64::MAX)),
            (3, u64::MAX, 4, None),
        ] {
            let next = next_epoch(recorded, heard, incarnation);
            assert_eq!(next, want, "{recorded} recorded, {heard} heard of, incarnation {incarnation}");
        }
    }
}
