//! The file of `--status-file`, for programs that show how far a job is.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use psjobs_ps::proto::{StatusReply, TrainerState};
use serde::Serialize;

use crate::bad_input::BadInput;

/// A file that is replaced whole by each status.
#[derive(Debug)]
pub struct StatusFile {
    file: PathBuf,
    part: PathBuf,
}

/// The contents. Names are those of the job's status on a cluster.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'a> {
    /// Steps done by all trainers together.
    step: u64,
    /// 0 while unknown.
    total_steps: u64,
    examples_per_second: f64,
    metrics: BTreeMap<&'a str, f64>,
    trainers: Vec<Trainer>,
    warnings: &'a [String],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Trainer {
    index: u32,
    /// As `ACTIVE`.
    state: String,
    step: u64,
    examples_per_second: f64,
}

impl StatusFile {
    /// # Errors
    /// [`BadInput`] if there is no folder for the file.
    pub fn new(file: PathBuf) -> Result<Self, BadInput> {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        if folder.is_some_and(|folder| !folder.is_dir()) {
            return Err(BadInput::new(format!("--status-file {}: there is no such folder", file.display())));
        }
        let mut part = file.clone().into_os_string();
        part.push(format!(".{}.part", std::process::id()));
        Ok(Self { file, part: part.into() })
    }

    /// Returns what writes a status. A disk that is full costs the reader a status, and not the job its end.
    pub fn into_observer(self) -> impl FnMut(&StatusReply) {
        move |reply| {
            let text = serde_json::to_string(&status(reply)).unwrap_or_default();
            if fs::write(&self.part, text).is_ok() {
                fs::rename(&self.part, &self.file).ok();
            }
        }
    }
}

fn status(reply: &StatusReply) -> Status<'_> {
    let state = |state: i32| TrainerState::try_from(state).unwrap_or_default().as_str_name();
    let trainers = reply.trainers.iter().map(|trainer| Trainer {
        index: trainer.index,
        state: state(trainer.state).trim_start_matches("TRAINER_STATE_").to_owned(),
        step: trainer.step,
        examples_per_second: trainer.examples_per_second,
    });
    Status {
        step: reply.step,
        total_steps: reply.total_steps,
        examples_per_second: reply.examples_per_second,
        metrics: reply.metrics.iter().map(|(name, value)| (name.as_str(), *value)).collect(),
        trainers: trainers.collect(),
        warnings: &reply.warnings,
    }
}
