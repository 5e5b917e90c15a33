//! The record of one run.

use std::collections::BTreeMap;

use psjobs_ps::proto::StatusReply;
use serde::{Serialize, Serializer};

use super::grid::{Metric, Run};
use psjobs::run::{State, Summary};

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    #[serde(skip)]
    pub run: Run,
    pub seed: u32,
    pub section: &'static str,
    pub way: &'static str,
    /// Seconds since the first step that was seen, and the metric of the experiment then.
    pub metric_over_seconds: Vec<(f64, f64)>,
    /// The steps of all trainers so far, and the metric then.
    pub metric_over_steps: Vec<(u64, f64)>,
    /// Updates by staleness, as in [`StatusReply`].
    pub staleness: Vec<u64>,
    /// The metric at the end; `None` if the job failed.
    #[serde(serialize_with = "by_name", flatten)]
    pub end: (Metric, Option<f64>),
    pub seconds: Option<f64>,
    pub steps_per_second: Option<f64>,
    pub examples_per_second: Option<f64>,
    /// Share of the trainers' time.
    pub waiting: Option<f64>,
    /// The bytes of all connections, both ways, as the servers have counted them.
    pub bytes: Option<u64>,
}

impl Record {
    pub fn new(run: Run, section: &'static str, way: &'static str, metric: Metric) -> Self {
        Self {
            run,
            seed: run.seed,
            section,
            way,
            metric_over_seconds: Vec::new(),
            metric_over_steps: Vec::new(),
            staleness: Vec::new(),
            end: (metric, None),
            seconds: None,
            steps_per_second: None,
            examples_per_second: None,
            waiting: None,
            bytes: None,
        }
    }

    /// Takes what server 0 said.
    pub fn observe(&mut self, seconds: f64, status: &StatusReply) {
        if !status.staleness.is_empty() {
            self.staleness.clone_from(&status.staleness);
        }
        // The trainer repeats its last evaluation until the next one.
        if let Some(value) = status.metrics.get(self.end.0.name)
            && self.metric_over_seconds.last().is_none_or(|(_, before)| before != value)
        {
            self.metric_over_seconds.push((seconds, *value));
            self.metric_over_steps.push((status.step, *value));
        }
    }

    /// Takes the figures of the end, `after` seconds.
    pub fn conclude(&mut self, summary: &Summary, after: f64) {
        if summary.state == State::Succeeded {
            self.end.1 = summary.metrics.get(self.end.0.name).copied();
            self.metric_over_seconds.extend(self.end.1.map(|value| (after, value)));
            self.metric_over_steps.extend(summary.steps.zip(self.end.1));
            self.bytes = summary.traffic.map(|traffic| traffic.received + traffic.sent);
        }
        self.seconds = summary.seconds;
        self.steps_per_second = summary.steps_per_second;
        self.examples_per_second = summary.examples_per_second;
        self.waiting = summary.waiting_share;
    }

    /// Seconds until the metric was first seen at `level`.
    pub fn reached(&self, level: f64) -> Option<f64> {
        let is_there = |(_, value): &&(f64, f64)| self.end.0.reaches(*value, level);
        self.metric_over_seconds.iter().find(is_there).map(|(seconds, _)| *seconds)
    }
}

/// The mean; `None` of nothing.
pub fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.into_iter().fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Writes the metric of the end under its own name.
fn by_name<S: Serializer>((metric, value): &(Metric, Option<f64>), serializer: S) -> Result<S::Ok, S::Error> {
    BTreeMap::from([(metric.name, value)]).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::super::grid::Experiment;
    use super::*;

    #[test]
    fn an_evaluation_counts_from_when_it_was_first_seen() {
        let run = Run { section: 0, way: 0, seed: 1 };
        let mut record = Record::new(run, "Even machines", "Async", Experiment::Modes.metric());
        for (step, seconds, accuracy) in
            [(10, 0.5, None), (20, 1.0, Some(0.8)), (30, 1.5, Some(0.8)), (40, 2.0, Some(0.95))]
        {
            let metrics = accuracy.map(|accuracy| ("accuracy".to_owned(), accuracy)).into_iter().collect();
            record.observe(seconds, &StatusReply { step, metrics, ..StatusReply::default() });
        }
        assert_eq!(record.metric_over_steps, [(20, 0.8), (40, 0.95)]);
        assert_eq!(record.metric_over_seconds, [(1.0, 0.8), (2.0, 0.95)]);
        assert_eq!((record.reached(0.9), record.reached(0.99)), (Some(2.0), None));
        let record = serde_json::to_value(record).expect("JSON");
        assert_eq!(record["accuracy"], serde_json::Value::Null);
    }
}
