//! Writes the manifest of a checkpoint, which makes it complete, and knows whether it was written: nothing else is written before
//! that.

use std::io::ErrorKind;
use std::time::Duration;

use tonic::{Code, Status};

use super::super::confirmed_commit::{self, remove_old, taken};
use super::{CheckpointSchedule, Committing, Kept};
use crate::checkpoint::{Checkpoint, CheckpointId, Damage, Manifest, Runs, write};
use crate::server::state::recovery::LastCheckpoint;

/// How long a manifest may take to be written before the status says that it does.
const SLOW_MANIFEST: Duration = Duration::from_secs(30);

impl CheckpointSchedule<'_> {
    /// Returns whether a checkpoint is what it would be if it was written now. One that was written when a server was stopped
    /// may lack gradients of its last step, and one that is damaged is replaced by a new one.
    pub(super) async fn may_amend(&self, id: CheckpointId, has_tables: bool) -> Result<bool, Status> {
        let folder = Runs::new(&self.config.folder).path(id);
        match self.config.folder.disk().work(move || Checkpoint::open(&folder)).await {
            Ok(checkpoint) => Ok(has_tables || checkpoint.is_even()),
            Err(damage) if damage.is_proved() => {
                tracing::warn!(%damage, "the newest checkpoint cannot be used; another one is written");
                Ok(false)
            }
            Err(damage) => Err(Status::internal(damage.to_string())),
        }
    }

    /// Adds trainers that have concluded since to the manifest of a complete checkpoint. Its parts stay as they are.
    pub(super) async fn add_concluded(&mut self, id: CheckpointId, kept: Kept) -> Result<bool, Status> {
        self.may_commit(self.state.recovery.epoch()).await?;
        let (folder, concluded) = (Runs::new(&self.config.folder).path(id), kept.concluded.clone());
        let commit = move || {
            let checkpoint = Checkpoint::open(&folder).map_err(|damage| Status::internal(damage.to_string()))?;
            let manifest = Manifest { concluded, ..checkpoint.manifest().clone() };
            write::amend(&folder, &manifest).map_err(internal)?;
            Ok(LastCheckpoint::complete(id, folder))
        };
        self.begin_commit(id, kept, true, commit, || {});
        self.settle().await
    }

    /// Begins to write a manifest. [`CheckpointSchedule::settle`] waits for it, at the latest before the next one.
    pub(super) fn begin_commit(
        &mut self,
        id: CheckpointId,
        kept: Kept,
        was_complete: bool,
        commit: impl FnOnce() -> Result<LastCheckpoint, Status> + Send + 'static,
        tidy: impl FnOnce() + Send + 'static,
    ) {
        let (disk, lock) = (self.config.folder.disk().clone(), self.lock.holder());
        let writing = tokio::spawn(confirmed_commit::complete(disk, lock, commit, tidy));
        self.committing = Some(Committing { id, kept, was_complete, writing });
    }

    /// Waits until the manifest that is being written is there, or is known not to be: one that comes later would be
    /// taken for that of files which have been written since. Returns false if none is being written.
    ///
    /// # Errors
    /// If it could not be written.
    pub(in super::super) async fn settle(&mut self) -> Result<bool, Status> {
        let Some(Committing { writing, .. }) = &mut self.committing else { return Ok(false) };
        let written = loop {
            if let Ok(written) = tokio::time::timeout(SLOW_MANIFEST, &mut *writing).await {
                break written.expect("disk work does not panic and is not cancelled");
            }
            let why =
                "the manifest of the newest one is still being written; see whether the checkpoint folder answers";
            self.state.recovery.write_failed(why, self.config.folder.disk().now());
        };
        let Some(Committing { id, kept, was_complete, .. }) = self.committing.take() else { return Ok(false) };
        let newest = written.inspect_err(|status| {
            // The process that has taken the folder may go on from it.
            if !was_complete && status.code() != Code::Aborted {
                self.unsure = Some((id, kept.clone()));
            }
        })?;
        if !was_complete {
            self.state.recovery.set_newest(newest);
        }
        self.state.members().kept(&kept.concluded);
        self.kept = Some(kept);
        Ok(true)
    }

    /// As [`CheckpointSchedule::settle`], before the servers go back to the newest checkpoint: if a manifest is there after
    /// all, its checkpoint is complete, and may be the one that is found.
    pub(in super::super) async fn settle_before_restore(&mut self) {
        if let Err(status) = self.settle().await {
            tracing::debug!(reason = status.message(), "the checkpoint before may be there or not");
        }
        self.unsure = None;
    }

    /// Checks that this process still leads: in a manifest are only parts that it has asked for in the current epoch.
    pub(super) async fn may_commit(&self, epoch: u64) -> Result<(), Status> {
        if epoch != self.state.recovery.greatest_epoch() {
            return Err(Status::aborted("the servers have gone to another checkpoint meanwhile"));
        }
        self.lock.check().await.map_err(taken)
    }

    /// Looks for the manifest whose writing failed. If it is there, its checkpoint is made durable and counts as complete: it
    /// may be the only one that a machine finds. A manifest that cannot be used is removed, because other parts may be written
    /// into its folder. Returns whether the checkpoint is complete.
    pub(super) async fn finish_unsure(&mut self) -> Result<bool, Status> {
        let Some((id, kept)) = self.unsure.clone() else { return Ok(false) };
        // A process that was replaced neither completes a checkpoint of its successor nor takes it back.
        self.must_hold_lock().await?;
        let (runs, keep) = (Runs::new(&self.config.folder), self.config.keep);
        let (lineage, folder) = (self.place.clone().map(|(_, lineage)| lineage).unwrap_or_default(), runs.path(id));
        let look = {
            let folder = folder.clone();
            move || match Checkpoint::open(&folder) {
                Ok(_) => Ok(true),
                Err(Damage::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(false),
                Err(damage) if damage.is_proved() => Ok(false),
                Err(damage) => Err(Status::internal(damage.to_string())),
            }
        };
        if self.config.folder.disk().work(look).await? {
            let commit = move || {
                write::flush_folder(&folder).map_err(internal)?;
                Ok(LastCheckpoint::complete(id, folder))
            };
            self.unsure = None;
            self.begin_commit(id, kept, false, commit, move || remove_old(&runs, &lineage, keep, id));
            return self.settle().await;
        }
        self.config.folder.disk().work(move || write::revoke(&folder)).await.map_err(internal)?;
        self.unsure = None;
        Ok(false)
    }

    /// Checks that this process has the lock of the folder, and that the lock can be read.
    pub(super) async fn must_hold_lock(&self) -> Result<(), Status> {
        self.lock.read().await.map_err(Status::internal)?.map_err(taken)
    }
}

fn internal(error: write::WriteError) -> Status {
    Status::internal(error.to_string())
}
