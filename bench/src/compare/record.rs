//! The record of one run.

use psjobs_ps::proto::StatusReply;
use serde::Serialize;

use super::grid::Run;
use psjobs::run::{State, Summary};

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    #[serde(skip)]
    pub run: Run,
    pub seed: u32,
    pub section: &'static str,
    pub way: &'static str,
    /// Seconds since the first step that was seen, and the test accuracy then.
    pub accuracy_over_seconds: Vec<(f64, f64)>,
    /// Updates by staleness, as in [`StatusReply`].
    pub staleness: Vec<u64>,
    /// At the end; `None` if the job failed.
    pub accuracy: Option<f64>,
    pub seconds: Option<f64>,
    pub steps_per_second: Option<f64>,
    pub examples_per_second: Option<f64>,
    /// Share of the trainers' time.
    pub waiting: Option<f64>,
}

impl Record {
    pub fn new(run: Run, section: &'static str, way: &'static str) -> Self {
        Self {
            run,
            seed: run.seed,
            section,
            way,
            accuracy_over_seconds: Vec::new(),
            staleness: Vec::new(),
            accuracy: None,
            seconds: None,
            steps_per_second: None,
            examples_per_second: None,
            waiting: None,
        }
    }

    /// Takes what server 0 said.
    pub fn observe(&mut self, seconds: f64, status: &StatusReply) {
        if !status.staleness.is_empty() {
            self.staleness.clone_from(&status.staleness);
        }
        // The trainer repeats its last evaluation until the next one.
        if let Some(accuracy) = status.metrics.get("accuracy")
            && self.accuracy_over_seconds.last().is_none_or(|(_, before)| before != accuracy)
        {
            self.accuracy_over_seconds.push((seconds, *accuracy));
        }
    }

    /// Takes the figures of the end, `after` seconds.
    pub fn conclude(&mut self, summary: &Summary, after: f64) {
        if summary.state == State::Succeeded {
            self.accuracy = summary.accuracy;
            self.accuracy_over_seconds.extend(summary.accuracy.map(|accuracy| (after, accuracy)));
        }
        self.seconds = summary.seconds;
        self.steps_per_second = summary.steps_per_second;
        self.examples_per_second = summary.examples_per_second;
        self.waiting = summary.waiting_share;
    }

    /// Seconds until the accuracy was first seen at `level`.
    pub fn reached(&self, level: f64) -> Option<f64> {
        self.accuracy_over_seconds.iter().find(|(_, accuracy)| *accuracy >= level).map(|(seconds, _)| *seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_counts_from_when_it_was_first_seen() {
        let mut record = Record::new(Run { section: 0, way: 0, seed: 1 }, "Even machines", "Async");
        for (seconds, accuracy) in [(0.5, None), (1.0, Some(0.8)), (1.5, Some(0.8)), (2.0, Some(0.95))] {
            let metrics = accuracy.map(|accuracy| ("accuracy".to_owned(), accuracy)).into_iter().collect();
            record.observe(seconds, &StatusReply { metrics, ..StatusReply::default() });
        }
        assert_eq!(record.accuracy_over_seconds, [(1.0, 0.8), (2.0, 0.95)]);
        assert_eq!((record.reached(0.9), record.reached(0.99)), (Some(2.0), None));
    }
}
