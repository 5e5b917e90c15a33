//! The runs in a checkpoint folder. A run is one life of training: it begins from nothing or from another run's
//! checkpoint, and goes on through restarts of its servers. Its folder, `run-00002`, holds its record and its
//! checkpoints.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::catalog::Catalog;
use super::disk::{Folder, names, read};
use super::format::FORMAT;
use super::write::{WriteError, flush_parent, put_file, remove_left_overs};

/// Name of a run's record.
pub const RUN: &str = "run.json";
/// Name of the file that says that a run has had a complete checkpoint. It is not part of [`RUN`]: a process that was replaced
/// and writes it late takes no epoch back.
pub const KEPT: &str = "kept.json";
/// Unique id that all jobs started by hand have.
pub const BY_HAND: &str = "manual";

/// The place of a checkpoint in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CheckpointId {
    /// Number of its run.
    pub run: u32,
    /// Step that it was taken at.
    pub step: u64,
}

/// The record of a run, in its folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// Number of the run; greater than those of all runs that began before.
    pub run: u32,
    /// Unique id of the job.
    pub uid: String,
    /// Name of the job.
    pub job: String,
    /// The checkpoint of another run that this one began from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from: Option<CheckpointId>,
    /// The newest epoch of the servers of this run. It is written before the servers hear of the epoch, so that no
    /// epoch is given twice even if all servers start anew.
    pub epoch: u64,
}

/// The knowledge of server 0 about its job when it chooses a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobIdentity {
    /// Unique id of the job.
    pub uid: String,
    /// Name of the job.
    pub job: String,
    /// How often server 0 was started before.
    pub incarnation: u32,
    /// A new run begins from the newest checkpoint in the folder.
    pub resume: bool,
    /// Other servers have given server 0 its blocks, so that the job is under way.
    pub given: bool,
}

/// The run that a job writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunChoice {
    /// A run of the job that exists.
    GoOn(u32),
    /// A new one.
    Begin,
}

/// Chooses the run of a job; `kept` are the runs that have had a checkpoint. A job goes on with its newest run. Jobs started
/// by hand share one id: of those, the first process of server 0 begins a new run if it is not to resume. Another job has one
/// run; a process of server 0 that was replaced while it looked for that run may have begun a second one, without a checkpoint.
#[must_use]
pub fn choose(runs: &[RunRecord], kept: &BTreeSet<u32>, job: &JobIdentity) -> RunChoice {
    let own = || runs.iter().filter(|run| run.uid == job.uid).map(|run| run.run);
    let by_hand = job.uid == BY_HAND;
    let with_checkpoint = own().filter(|run| !by_hand && kept.contains(run)).max();
    let anew = by_hand && !job.resume && job.incarnation == 0 && !job.given;
    with_checkpoint.or_else(|| own().max()).filter(|_| !anew).map_or(RunChoice::Begin, RunChoice::GoOn)
}

/// Returns the run that a server takes for that of its job before server 0 has sent it the run. Jobs started by hand share
/// one id, so that their newest run may be that of a job before: only server 0, which chooses the run, takes it.
#[must_use]
pub fn presumed(runs: &[RunRecord], kept: &BTreeSet<u32>, job: &JobIdentity, server: u32) -> Option<u32> {
    match choose(runs, kept, job) {
        RunChoice::GoOn(run) if server == 0 || job.uid != BY_HAND => Some(run),
        _ => None,
    }
}

/// A run whose checkpoints a job may go back to, up to `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Number of the run.
    pub run: u32,
    /// Last step that belongs to the lineage, if not all do.
    pub until: Option<u64>,
}

/// Returns the lineage of `run`: the run itself, then the runs that it descends from, each up to the step that the next
/// one began from.
#[must_use]
pub fn lineage(runs: &[RunRecord], run: u32) -> Vec<Ancestor> {
    let mut lineage = vec![Ancestor { run, until: None }];
    let mut current = run;
    while let Some(origin) = runs.iter().find(|record| record.run == current).and_then(|record| record.resumed_from) {
        // A run descends from an earlier one only, whatever its record says.
        if origin.run >= current {
            break;
        }
        lineage.push(Ancestor { run: origin.run, until: Some(origin.step) });
        current = origin.run;
    }
    lineage
}

/// Returns the lineages of the other runs that have a run in common with the lineage `own`: their jobs may go back to
/// checkpoints of it.
#[must_use]
pub fn relatives(runs: &[RunRecord], own: &[Ancestor]) -> Vec<Vec<Ancestor>> {
    let is_own = |run: u32| own.iter().any(|ancestor| ancestor.run == run);
    let others = runs.iter().filter(|record| own.first().is_none_or(|own| own.run != record.run));
    let lineages = others.map(|record| lineage(runs, record.run));
    lineages.filter(|other| other.iter().any(|ancestor| is_own(ancestor.run))).collect()
}

/// Returns the checkpoints that can go, of `complete` in the order of the lineage and descending in each run: all but
/// the `keep` newest, the one just `written`, and those `needed` by other runs.
#[must_use]
pub fn surplus(
    complete: &[CheckpointId],
    keep: usize,
    written: CheckpointId,
    needed: &BTreeSet<CheckpointId>,
) -> Vec<CheckpointId> {
    let older = complete.iter().skip(keep.max(1)).copied();
    older.filter(|id| *id != written && !needed.contains(id)).collect()
}

/// The runs in a folder cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum RunsError {
    /// The folder or a file in it cannot be read now.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file or folder.
        file: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A checkpoint that can go cannot be removed.
    #[error("cannot remove {}: {source}", folder.display())]
    Remove {
        /// Its folder.
        folder: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A record is not one.
    #[error("{} is damaged: {problem}; restore the file, or move the folder of the run away", file.display())]
    Damaged {
        /// The record.
        file: PathBuf,
        /// The fault.
        problem: String,
    },
}

/// A folder of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    folder: Folder,
}

impl Runs {
    /// Describes the runs in `folder`, which need not exist yet.
    #[must_use]
    pub fn new(folder: impl Into<Folder>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the folder of all runs.
    #[must_use]
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the checkpoints of a run.
    #[must_use]
    pub fn catalog(&self, run: u32) -> Catalog {
        Catalog::new(self.folder.folder(&format!("run-{run:05}")))
    }

    /// Returns the folder of a checkpoint.
    #[must_use]
    pub fn path(&self, id: CheckpointId) -> Folder {
        self.catalog(id.run).path(id.step)
    }

    /// Returns the records of all runs, ascending. A folder without a record is left over from a run that never began.
    ///
    /// # Errors
    /// If the folder or a record cannot be read; a folder that does not exist holds none.
    pub fn list(&self) -> Result<Vec<RunRecord>, RunsError> {
        let numbers = self.numbers().map_err(|source| RunsError::Read { file: self.folder.to_path_buf(), source })?;
        let records = numbers.into_iter().map(|run| self.record(run));
        records.filter_map(Result::transpose).collect()
    }

    /// Returns the checkpoints of the newest run, if there is any. For tools that look at a folder from outside.
    ///
    /// # Errors
    /// If the folder or a record cannot be read.
    pub fn newest(&self) -> Result<Option<Catalog>, RunsError> {
        Ok(self.list()?.last().map(|record| self.catalog(record.run)))
    }

    /// Returns the complete checkpoints of a lineage, newest first.
    ///
    /// # Errors
    /// If the folder of a run cannot be read.
    pub fn complete(&self, lineage: &[Ancestor]) -> Result<Vec<CheckpointId>, RunsError> {
        self.of_lineage(lineage, Catalog::complete)
    }

    /// Returns the checkpoints of a lineage that were set aside as damaged.
    ///
    /// # Errors
    /// If the folder of a run cannot be read.
    pub fn damaged(&self, lineage: &[Ancestor]) -> Result<Vec<CheckpointId>, RunsError> {
        self.of_lineage(lineage, Catalog::damaged)
    }

    /// Begins a run, durably. Making the folder decides between two that begin at the same time.
    ///
    /// # Errors
    /// If the folder or the record cannot be written.
    pub fn begin(
        &self,
        job: &JobIdentity,
        resumed_from: Option<CheckpointId>,
        epoch: u64,
    ) -> Result<RunRecord, WriteError> {
        let disk = self.folder.disk();
        disk.create_folders(&self.folder).map_err(WriteError::at(&self.folder))?;
        let newest = self.numbers().map_err(WriteError::at(&self.folder))?.last().copied().unwrap_or(0);
        let mut run = newest.saturating_add(1);
        loop {
            let folder = self.catalog(run).folder().clone();
            match disk.create_folder(&folder) {
                Ok(()) => break flush_parent(&folder)?,
                Err(error) if error.kind() == ErrorKind::AlreadyExists && run < u32::MAX => run += 1,
                Err(error) => return Err(WriteError::at(&folder)(error)),
            }
        }
        let (uid, job) = (job.uid.clone(), job.job.clone());
        let record = RunRecord { format: FORMAT, run, uid, job, resumed_from, epoch };
        self.put(&record).inspect_err(|_| {
            // Without a record the folder is nothing. One that has it may be another process's run by now.
            let folder = self.catalog(run).folder().clone();
            if disk.exists(&folder.join(RUN)).is_ok_and(|is_there| !is_there) {
                drop(disk.remove_folder(&folder));
            }
        })?;
        Ok(record)
    }

    /// Writes the record of a run anew, durably.
    ///
    /// # Errors
    /// If it cannot be written; the one before stays.
    ///
    /// # Panics
    /// Never: a record is JSON.
    pub fn put(&self, record: &RunRecord) -> Result<(), WriteError> {
        let mut json = serde_json::to_vec_pretty(record).expect("a record is JSON");
        json.push(b'\n');
        put_file(self.catalog(record.run).folder(), RUN, &json)
    }

    /// Records, durably, that the run of the complete checkpoint `id` has had one. From then on a job of this run that finds
    /// no checkpoint has lost them, and does not begin from nothing.
    ///
    /// # Errors
    /// If it cannot be written.
    ///
    /// # Panics
    /// Never: a place is JSON.
    pub fn note_kept(&self, id: CheckpointId) -> Result<(), WriteError> {
        let folder = self.catalog(id.run).folder().clone();
        let file = folder.join(KEPT);
        if folder.disk().exists(&file).map_err(WriteError::at(&file))? {
            return Ok(());
        }
        let mut json = serde_json::to_vec(&id).expect("a place is JSON");
        json.push(b'\n');
        put_file(&folder, KEPT, &json)
    }

    /// Returns whether a run has had a complete checkpoint. A run of an earlier version of psjobs may not say so.
    ///
    /// # Errors
    /// If the folder of the run cannot be read.
    pub fn has_kept(&self, run: u32) -> Result<bool, RunsError> {
        let file = self.catalog(run).folder().join(KEPT);
        self.folder.disk().exists(&file).map_err(|source| RunsError::Read { file, source })
    }

    /// Returns those of `runs` that have had a complete checkpoint, see [`Runs::has_had_one`].
    ///
    /// # Errors
    /// If the folder of a run cannot be read.
    pub fn kept(&self, runs: &[RunRecord]) -> Result<BTreeSet<u32>, RunsError> {
        let kept = runs.iter().map(|record| Ok(self.has_had_one(record.run)?.then_some(record.run)));
        kept.filter_map(Result::transpose).collect()
    }

    /// Returns whether a run has had a complete checkpoint. One that is there, or was set aside as damaged, counts although the
    /// file that says so was not written.
    ///
    /// # Errors
    /// If the folder of the run cannot be read.
    pub fn has_had_one(&self, run: u32) -> Result<bool, RunsError> {
        let alone = [Ancestor { run, until: None }];
        Ok(self.has_kept(run)? || !self.complete(&alone)?.is_empty() || !self.damaged(&alone)?.is_empty())
    }

    /// Removes what a lineage does not need any more after the checkpoint `written`: complete checkpoints beyond the
    /// `keep` newest, checkpoints that were never completed, and damaged ones that are older than all that are kept.
    /// Checkpoints of other runs stay, and of this lineage the one that each other run would go back to. Returns what went.
    ///
    /// # Errors
    /// If something cannot be read or removed; what it belongs to counts as incomplete then.
    pub fn prune(
        &self,
        lineage: &[Ancestor],
        keep: usize,
        written: CheckpointId,
    ) -> Result<Vec<CheckpointId>, RunsError> {
        let complete = self.complete(lineage)?;
        let mut gone = surplus(&complete, keep, written, &self.needed_by_others(lineage)?);
        let full = complete.len() >= keep.max(1);
        // One that stays for another run alone does not count: damaged ones would stay as long as it does.
        let oldest_kept = complete.iter().take(keep.max(1)).min().map(|oldest| written.min(*oldest));
        let damaged = self.damaged(lineage)?;
        for id in self.of_lineage(lineage, Catalog::steps)? {
            let before_oldest = oldest_kept.is_some_and(|oldest| id < oldest);
            let left_over = if damaged.contains(&id) { full && before_oldest } else { id < written };
            if left_over && !complete.contains(&id) {
                gone.push(id);
            }
        }
        for id in &gone {
            let removed = self.catalog(id.run).remove(id.step);
            removed.map_err(|source| RunsError::Remove { folder: self.path(*id).to_path_buf(), source })?;
        }
        Ok(gone)
    }

    /// Removes the files that processes have begun to write in this folder and not completed. Only the holder of its lock
    /// may do so, before it asks servers for parts: what others still write was asked for by a process before it, and
    /// belongs to no checkpoint.
    ///
    /// # Errors
    /// If a folder cannot be read or a file cannot be removed.
    pub fn remove_left_overs(&self) -> io::Result<()> {
        // Others write their lock before they hold it.
        remove_left_overs(&self.folder, |name| !name.starts_with("lock"))?;
        for run in self.numbers()? {
            let catalog = self.catalog(run);
            remove_left_overs(catalog.folder(), |_| true)?;
            for step in catalog.steps()? {
                remove_left_overs(&catalog.path(step), |_| true)?;
            }
        }
        Ok(())
    }

    /// Returns the checkpoints that other runs would go back to, as far as they may be in the lineage `own`.
    fn needed_by_others(&self, own: &[Ancestor]) -> Result<BTreeSet<CheckpointId>, RunsError> {
        let others = relatives(&self.list()?, own);
        let newest = others.iter().map(|other| self.complete(other).map(|complete| complete.first().copied()));
        newest.filter_map(Result::transpose).collect()
    }

    fn of_lineage(
        &self,
        lineage: &[Ancestor],
        steps: impl Fn(&Catalog) -> io::Result<BTreeSet<u64>>,
    ) -> Result<Vec<CheckpointId>, RunsError> {
        let mut found = Vec::new();
        for Ancestor { run, until } in lineage.iter().copied() {
            let catalog = self.catalog(run);
            let steps =
                steps(&catalog).map_err(|source| RunsError::Read { file: catalog.folder().to_path_buf(), source })?;
            let steps = steps.range(..=until.unwrap_or(u64::MAX)).rev();
            found.extend(steps.map(|step| CheckpointId { run, step: *step }));
        }
        Ok(found)
    }

    fn numbers(&self) -> io::Result<Vec<u32>> {
        let number = |name: &std::ffi::OsString| {
            let run = name.to_str()?.strip_prefix("run-")?.parse().ok()?;
            // Other spellings of the number are not ours.
            (self.catalog(run).folder().file_name() == Some(name)).then_some(run)
        };
        let mut numbers: Vec<u32> = names(self.folder.disk(), &self.folder)?.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Returns the record of a run, `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn record(&self, run: u32) -> Result<Option<RunRecord>, RunsError> {
        let file = self.catalog(run).folder().join(RUN);
        let json = match read(self.folder.disk(), &file) {
            Ok(Some(json)) => json,
            Ok(None) => return Ok(None),
            Err(source) => return Err(RunsError::Read { file, source }),
        };
        match serde_json::from_slice::<RunRecord>(&json) {
            Ok(record) if record.run == run && record.format == FORMAT => Ok(Some(record)),
            Ok(record) => {
                let (found, format) = (record.run, record.format);
                let problem = format!("it describes run {found} in format {format}, not run {run} in format {FORMAT}");
                Err(RunsError::Damaged { file, problem })
            }
            Err(error) => Err(RunsError::Damaged { file, problem: error.to_string() }),
        }
    }
}
