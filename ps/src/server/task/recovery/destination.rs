//! Finds the run of the job and the checkpoint that all servers go to. Only checkpoints of the run and of those that it
//! descends from are looked at; one that is proved to be damaged is set aside.

use crate::checkpoint::runs::{Ancestor, JobIdentity, RunChoice, RunRecord, RunsError, choose, lineage};
use crate::checkpoint::{Checkpoint, CheckpointId, Concluded, Runs, write};

use super::folder::FolderError;

/// The run of a job, and where it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub record: RunRecord,
    pub lineage: Vec<Ancestor>,
    /// The newest checkpoint; `None` begins from nothing.
    pub checkpoint: Option<CheckpointId>,
    /// Trainers that had concluded in it. A job that goes on from another one's has work for all of its own.
    pub concluded: Concluded,
}

/// Finds where the job, which has so many `trainers`, goes on, in its run `own` if that is known. Begins a run if there is
/// none.
pub(super) fn find(
    runs: &Runs,
    job: &JobIdentity,
    own: Option<u32>,
    trainers: u32,
) -> Result<Destination, FolderError> {
    let mut records = runs.list()?;
    let choice = match own {
        Some(run) => RunChoice::GoOn(run),
        None => choose(&records, &runs.kept(&records)?, job),
    };
    let (found, run) = match choice {
        RunChoice::GoOn(run) => {
            let lineage = lineage(&records, run);
            let found = newest_undamaged(runs, &lineage)?;
            let record = records.iter().find(|record| record.run == run);
            let origin = record.and_then(|record| record.resumed_from);
            let had_one = || Ok::<_, RunsError>(runs.has_kept(run)? || !runs.damaged(&lineage)?.is_empty());
            if found.is_none() && (origin.is_some() || had_one()?) {
                return Err(nothing_left(runs, run, "start a new job, with checkpoint.resume false or another folder"));
            }
            (found, run)
        }
        RunChoice::Begin => {
            let found = if job.resume { newest_of_all(runs, &records)? } else { None };
            // Greater than the epochs that trainers of earlier runs may know.
            let epoch = records.iter().map(|record| record.epoch).max().unwrap_or(0);
            let record = runs.begin(job, found.as_ref().map(|(id, _)| *id), epoch)?;
            let run = record.run;
            records.push(record);
            (found, run)
        }
    };
    let lineage = lineage(&records, run);
    let Some(record) = records.into_iter().find(|record| record.run == run) else {
        let folder = runs.catalog(run).folder().display().to_string();
        return Err(FolderError::Wait(format!(
            "{folder} holds no run.json any more; check that the folder is mounted"
        )));
    };
    let concluded = |checkpoint: Checkpoint| {
        let own = checkpoint.description().job == job.uid;
        if own { checkpoint.concluded(trainers) } else { Concluded::new() }
    };
    let (checkpoint, concluded) = found.map(|(id, checkpoint)| (id, concluded(checkpoint))).unzip();
    Ok(Destination { record, lineage, checkpoint, concluded: concluded.unwrap_or_default() })
}

/// Sets a checkpoint aside that is proved to be damaged, and says so.
pub(super) fn set_aside(runs: &Runs, id: CheckpointId, why: &str) -> Result<(), FolderError> {
    runs.catalog(id.run).set_aside(id.step)?;
    let folder = runs.path(id);
    tracing::error!(folder = %folder.display(), reason = why, "a checkpoint is damaged; set aside, trying the one before");
    Ok(())
}

fn newest_of_all(runs: &Runs, records: &[RunRecord]) -> Result<Option<(CheckpointId, Checkpoint)>, FolderError> {
    let mut lost = None;
    for RunRecord { run, .. } in records.iter().rev() {
        let alone = [Ancestor { run: *run, until: None }];
        let found = newest_undamaged(runs, &alone)?;
        if found.is_some() {
            return Ok(found);
        }
        if runs.has_had_one(*run)? {
            lost = lost.or(Some(*run));
        }
    }
    match lost {
        Some(run) => Err(nothing_left(runs, run, "set checkpoint.resume to false to begin from nothing")),
        None => Ok(None),
    }
}

/// Returns the newest checkpoint of a lineage that opens. Its blocks are verified when they are read.
fn newest_undamaged(runs: &Runs, lineage: &[Ancestor]) -> Result<Option<(CheckpointId, Checkpoint)>, FolderError> {
    for id in runs.complete(lineage)? {
        match Checkpoint::open(runs.path(id)) {
            Ok(checkpoint) => {
                // The process that wrote it may have ended before its manifest was durable.
                write::flush_folder(runs.path(id)).map_err(|error| FolderError::Wait(error.to_string()))?;
                return Ok(Some((id, checkpoint)));
            }
            Err(damage) if damage.is_proved() => set_aside(runs, id, &damage.to_string())?,
            Err(damage) => {
                return Err(FolderError::Wait(format!(
                    "{damage}; check that the checkpoint folder is mounted and readable"
                )));
            }
        }
    }
    Ok(None)
}

fn nothing_left(runs: &Runs, run: u32, advice: &str) -> FolderError {
    let folder = runs.catalog(run).folder().display().to_string();
    FolderError::Refuse(format!(
        "no checkpoint is left that run {run} can go on from: those in {folder} and before it are damaged or were \
         removed; restore them, or {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_whose_checkpoints_are_gone_does_not_begin_from_nothing() {
        for (label, uid, resume, has_had_one, is_refused) in [
            ("its own run, which never had one", "a", true, false, false),
            ("its own run", "a", true, true, true),
            ("its own run, not to resume others'", "a", false, true, true),
            ("the run of another job", "b", true, true, true),
            ("the run of another job, which never had one", "b", true, false, false),
            ("the run of another job, not to resume", "b", false, true, false),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let runs = Runs::new(folder.path());
            let job = |uid: &str| {
                let (uid, job) = (uid.to_owned(), "mnist".to_owned());
                JobIdentity { uid, job, incarnation: 0, resume, given: false }
            };
            let run = runs.begin(&job("a"), None, 0).expect("begins").run;
            if has_had_one {
                runs.note_kept(CheckpointId { run, step: 5 }).expect("writes");
            }
            match find(&runs, &job(uid), None, 1) {
                Ok(found) => assert!(!is_refused && found.checkpoint.is_none(), "{label}: {found:?}"),
                Err(FolderError::Refuse(why)) => assert!(is_refused && why.contains("run-00001"), "{label}: {why}"),
                Err(FolderError::Wait(why)) => panic!("{label}: {why}"),
            }
        }
    }
}
