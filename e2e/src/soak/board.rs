//! The record of a soak: its jobs and their steps, its faults and whom they hit, and what went wrong. Prints a line for
//! each event.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::kind::Kind;
use super::schedule::Fault;
use super::series::Sample;

/// A job of the soak.
#[derive(Clone, Debug)]
pub struct JobRecord {
    pub kind: Kind,
    pub name: String,
    /// When it had succeeded or failed.
    pub end: Option<Duration>,
    pub succeeded: bool,
    pub samples: Vec<Sample>,
    /// Pods that were replaced.
    pub replaced: u32,
    /// Its result was that of an undisturbed job; `None` for a kind whose results never repeat.
    pub equal: Option<bool>,
}

/// A fault that has happened.
#[derive(Clone, Debug)]
pub struct FaultRecord {
    pub fault: Fault,
    pub from: Duration,
    /// When it was mended.
    pub until: Duration,
    /// Names of the jobs that it concerned.
    pub jobs: Vec<String>,
}

/// All records.
#[derive(Clone, Debug, Default)]
pub struct Records {
    pub jobs: Vec<JobRecord>,
    pub faults: Vec<FaultRecord>,
    /// Faults of the schedule that could not happen.
    pub skipped: u32,
    /// Sentences, each of which makes the soak fail.
    pub problems: Vec<String>,
}

/// The records, shared by everything that runs at the same time.
#[derive(Debug)]
pub struct Board {
    start: Instant,
    records: Mutex<Records>,
}

impl Board {
    pub fn new() -> Self {
        Self { start: Instant::now(), records: Mutex::default() }
    }

    /// Returns the time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints a line with the time.
    pub fn say(&self, line: impl Display) {
        println!("{:>5.0} s  {line}", self.now().as_secs_f64());
    }

    /// Records a problem, and prints it.
    pub fn problem(&self, sentence: String) {
        self.say(format_args!("PROBLEM: {sentence}"));
        self.records().problems.push(sentence);
    }

    /// Begins the record of a job.
    pub fn begin(&self, kind: Kind, name: &str) {
        let (name, samples) = (name.to_owned(), Vec::new());
        let job = JobRecord { kind, name, end: None, succeeded: false, samples, replaced: 0, equal: None };
        self.records().jobs.push(job);
    }

    /// Changes the record of a job.
    pub fn update(&self, name: &str, change: impl FnOnce(&mut JobRecord)) {
        if let Some(job) = self.records().jobs.iter_mut().rfind(|job| job.name == name) {
            change(job);
        }
    }

    /// Returns the name of a kind's job that is training.
    pub fn training(&self, kind: Kind) -> Option<String> {
        let records = self.records();
        let trains = |job: &&JobRecord| job.end.is_none() && job.samples.last().is_some_and(|last| last.step > 0);
        records.jobs.iter().rfind(|job| job.kind == kind).filter(trains).map(|job| job.name.clone())
    }
}
