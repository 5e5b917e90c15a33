//! The memory of the lifecycle: replicas, failures and reports.

use std::time::Duration;

use psjobs_api::Replica;

use crate::run::exit::Exit;

/// A process that ended badly.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub replica: Replica,
    pub exit: Exit,
    /// The last lines that it wrote.
    pub tail: Vec<String>,
}

/// One replica.
#[derive(Debug, Default)]
pub struct Member {
    pub incarnation: u32,
    pub failures_in_a_row: u32,
    pub state: State,
    /// When the newest process started.
    pub started: Duration,
    /// It has had a process since the job, or all of it, last started.
    pub was_started: bool,
    /// A server that trainers can reach.
    pub is_ready: bool,
    /// Its last process ended because another one was away.
    pub found_no_server: bool,
}

/// The state of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum State {
    /// Not started yet.
    #[default]
    Waiting,
    Running,
    /// To be started again at this time.
    StartsAt(Duration),
    /// A server that ended before the trainers; failed at this time unless they end too.
    FailsAt(Duration),
    /// Asked to end.
    Stopping,
    /// Ended, and starts again together with all others.
    Stopped,
    Done,
    /// A trainer that the job goes on without.
    Lost,
}

impl State {
    pub fn due(self) -> Option<Duration> {
        match self {
            Self::StartsAt(at) | Self::FailsAt(at) => Some(at),
            _ => None,
        }
    }

    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Lost)
    }
}

/// The last report of server 0.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub step: u64,
    pub total: u64,
    /// When it first said this step.
    pub stepped: Duration,
    pub heard: Duration,
    /// Its age was looked at when a stall was due, and it was too old to say anything.
    pub is_stale: bool,
}

/// Failures that follow one another.
#[derive(Debug)]
pub struct Trouble {
    pub first: Failure,
    pub last: Duration,
}

/// A restart of the whole job, and how often that happened.
#[derive(Debug, Default)]
pub struct Recreation {
    /// When the processes are stopped.
    pub at: Option<Duration>,
    /// The processes are being stopped.
    pub stopping: bool,
    /// Restarts of the whole job in a row.
    pub in_a_row: u32,
    pub counts: bool,
}

impl Recreation {
    pub fn is_pending(&self) -> bool {
        self.at.is_some() || self.stopping
    }
}
