//! Files on the disk of server 0: the event files, and the checkpoints that say which of their points stay.

use std::error::Error;

use psjobs_ps::checkpoint::{Catalog, Checkpoint, Disk, Folder, Runs};
use psjobs_ps::series::IN_RUN;
use psjobs_ps::series::reader::SeriesReader;
use tokio::time::Instant;

use crate::backlog::Backlog;
use crate::durable::{Durable, Settling};
use crate::error::{TrackingError, words};

/// The folders of a job, at least one of the two.
#[derive(Clone, Debug)]
pub struct Folders {
    /// That of the series, if they are not beside the checkpoints.
    pub series: Option<Folder>,
    /// That of the checkpoints, if there are any.
    pub checkpoints: Option<Folder>,
    /// Steps that a trainer makes for one step of a checkpoint.
    pub steps_per_exchange: u64,
    /// Trainers come and go, and do not make their steps again.
    pub elastic: bool,
}

/// The files of a job.
#[derive(Debug)]
pub struct Files {
    folders: Folders,
    /// Unique id of the job, by which its run in the checkpoint folder is found.
    uid: String,
    /// The checkpoints of that run, once it is there.
    catalog: Option<Catalog>,
    /// Step of the newest checkpoint that was looked at, and its trainers' steps.
    newest: Option<(u64, Durable)>,
    settling: Settling,
}

impl Files {
    /// Describes the files of the job `uid`.
    pub fn new(folders: Folders, uid: &str) -> Self {
        Self { folders, uid: uid.to_owned(), catalog: None, newest: None, settling: Settling::default() }
    }

    /// Returns the disk that the files are on.
    pub fn disk(folders: &Folders) -> Disk {
        let folder = folders.series.as_ref().or(folders.checkpoints.as_ref());
        folder.map(|folder| folder.disk().clone()).unwrap_or_default()
    }

    /// Returns whether each look at the files is a request to an object store.
    pub fn are_remote(folders: &Folders) -> bool {
        let mut all = [&folders.series, &folders.checkpoints].into_iter().flatten();
        all.any(|folder| folder.disk().grows_by_rewriting())
    }

    /// Gives `backlog` what was written since the last time, if it has room, and returns what of it may be sent `now`; `all` if
    /// the job is over. Calls `has_read` after each record. Waits for the disk.
    ///
    /// # Errors
    /// If a file cannot be read. The next call goes on behind what `backlog` was given.
    pub fn read(
        &mut self,
        reader: &mut Option<SeriesReader>,
        backlog: &mut Backlog,
        all: bool,
        now: Instant,
        has_read: impl Fn(),
    ) -> Result<Durable, TrackingError> {
        // First: what is read then has every point of before.
        let newest = if all { Durable::All } else { self.newest()? };
        let durable = self.settling.observe(newest, now).clone();
        if !backlog.has_room(&durable) {
            return Ok(durable);
        }
        if reader.is_none() {
            *reader = self.series()?.map(SeriesReader::new);
        }
        if let Some(reader) = reader {
            let take = |source, entry| {
                backlog.take(source, entry);
                has_read();
            };
            reader.read(take).map_err(|error| of_disk(&error))?;
        }
        Ok(durable)
    }

    /// Returns the folder of the series, if it is known yet.
    fn series(&mut self) -> Result<Option<Folder>, TrackingError> {
        if let Some(folder) = &self.folders.series {
            return Ok(Some(folder.clone()));
        }
        Ok(self.catalog()?.map(|catalog| catalog.folder().folder(IN_RUN)))
    }

    /// Returns the points that no restart of now takes back.
    fn newest(&mut self) -> Result<Durable, TrackingError> {
        if self.folders.checkpoints.is_none() || self.folders.elastic {
            return Ok(Durable::All);
        }
        let Some(catalog) = self.catalog()? else { return Ok(Durable::Nothing) };
        let complete = catalog.complete().map_err(|error| of_disk(&error))?;
        let Some(step) = complete.last().copied() else { return Ok(Durable::Nothing) };
        if let Some((_, known)) = self.newest.as_ref().filter(|(newest, _)| *newest == step) {
            return Ok(known.clone());
        }
        match Checkpoint::open(catalog.path(step)) {
            Ok(checkpoint) => {
                let each = self.folders.steps_per_exchange;
                let steps = checkpoint.steps_held().into_iter().map(|held| held.saturating_mul(each)).collect();
                let durable = Durable::UpTo(steps);
                self.newest = Some((step, durable.clone()));
                Ok(durable)
            }
            // It was removed meanwhile, or the servers will set it aside: the one before is as good.
            Err(damage) => {
                tracing::debug!(%damage, "the newest checkpoint does not say yet which metrics stay");
                Ok(self.newest.as_ref().map(|(_, known)| known.clone()).unwrap_or_default())
            }
        }
    }

    /// Returns the checkpoints of the job's run: the newest one of its id, as the servers choose it.
    fn catalog(&mut self) -> Result<Option<Catalog>, TrackingError> {
        if self.catalog.is_none()
            && let Some(folder) = &self.folders.checkpoints
        {
            let runs = Runs::new(folder);
            let records = runs.list().map_err(|error| of_disk(&error))?;
            let own = records.iter().filter(|record| record.uid == self.uid).map(|record| record.run).max();
            self.catalog = own.map(|run| runs.catalog(run));
        }
        Ok(self.catalog.clone())
    }
}

fn of_disk(error: &dyn Error) -> TrackingError {
    TrackingError::Disk(words(error))
}
