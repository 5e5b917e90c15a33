//! The series of a job: every value of every metric that its trainers report, with its step and time, and what server 0
//! measures itself. Server 0 appends them to event files of TensorBoard, from which they are also read again.
//!
//! ```text
//! FOLDER/trainer-0/events.out.tfevents.1764204367.0123abcd     one file for each process of server 0
//! FOLDER/job/events.out.tfevents.1764204367.0123abcd           what server 0 measures
//! ```
//!
//! In the series of one source the steps of each metric increase. A point that does not follow the last one of its metric
//! is there already and is left out, so that a trainer may send points again whose arrival it does not know of. A trainer that
//! goes back to an earlier step says so; its next file begins with an event by which readers discard the points above that step.
//!
//! [`event_file`] says what is in a file, [`writer`] writes the files of all sources, [`reader`] reads them while they grow, and [`past`]
//! makes of them what the page of a job shows.

pub mod event_file;
pub mod past;
pub mod reader;
pub mod writer;

use std::fmt;

/// Folder of the series of a run, beside its checkpoints.
pub const IN_RUN: &str = "metrics";
/// Longest name of a metric, in bytes.
pub const LONGEST_NAME: usize = 128;
/// Metrics of one source, and of all together that a job's status shows.
pub const MOST_METRICS: usize = 32;

/// The process that points come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Server 0, which measures the whole job.
    Job,
    /// A trainer, by its index.
    Trainer(u32),
}

impl Source {
    /// Returns the source whose folder has this name.
    #[must_use]
    pub fn of_folder(name: &str) -> Option<Self> {
        match name.strip_prefix("trainer-") {
            Some(index) => index.parse().ok().map(Self::Trainer),
            None => (name == "job").then_some(Self::Job),
        }
    }
}

impl fmt::Display for Source {
    /// Writes the name of its folder.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job => f.write_str("job"),
            Self::Trainer(index) => write!(f, "trainer-{index}"),
        }
    }
}
