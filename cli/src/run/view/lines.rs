//! Progress as plain lines, for logs and pipes: one every few seconds, if anything changed.

use std::time::{Duration, Instant};

use psjobs_ps::proto::StatusReply;

use super::print::print;
use super::words::{self, Pace};

const PERIOD: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Lines {
    name: String,
    last: Option<(Instant, u64)>,
    pace: Pace,
}

impl Lines {
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), last: None, pace: Pace::default() }
    }

    pub fn progress(&mut self, status: &StatusReply) {
        let due = self.last.is_none_or(|(at, step)| at.elapsed() >= PERIOD && step != status.step);
        if let Some(text) = words::progress(status, &mut self.pace, Instant::now()).filter(|_| due) {
            print(&format!("{}: {text}", self.name));
            self.last = Some((Instant::now(), status.step));
        }
    }

    pub fn draining(&self) {
        print(&format!("{}: all trainers are done, waiting for the servers to end", self.name));
    }
}
