//! The values that a run does not have yet, and which of them are sent next.

use std::collections::{BTreeMap, VecDeque};

use psjobs_ps::series::Source;
use psjobs_ps::series::event_file::Point;
use psjobs_ps::series::writer::Entry;

use crate::durable::Durable;
use crate::messages::Metric;

/// The most values that MLflow takes at once.
pub const MOST_AT_ONCE: usize = 1000;

/// The most values that wait while none may be sent. Later ones stay in the files.
const MOST_WAITING: usize = 100_000;

/// Values that were read and not sent. In the run the steps of each metric increase, so that a value whose step is not above the last
/// one's is there already, or one of the same step is.
#[derive(Debug, Default)]
pub struct Backlog {
    /// The last step of each metric that the run has.
    positions: BTreeMap<String, u64>,
    /// By the name of its metric in the run.
    curves: BTreeMap<String, Curve>,
}

/// The values of one metric.
#[derive(Debug)]
struct Curve {
    source: Source,
    /// Ascending.
    waiting: VecDeque<Value>,
}

#[derive(Clone, Copy, Debug)]
struct Value {
    step: u64,
    unix_milliseconds: i64,
    value: f32,
}

impl Backlog {
    /// Begins with nothing, for a run that has each metric up to the step in `positions`.
    pub fn new(positions: BTreeMap<String, u64>) -> Self {
        Self { positions, curves: BTreeMap::new() }
    }

    /// Takes what comes next in the series of `source`.
    pub fn take(&mut self, source: Source, entry: Entry) {
        match entry {
            Entry::Point(point) => self.take_point(source, point),
            Entry::Rewind(step) => {
                for curve in self.curves.values_mut().filter(|curve| curve.source == source) {
                    let kept = curve.waiting.partition_point(|value| value.step <= step);
                    curve.waiting.truncate(kept);
                }
            }
        }
    }

    fn take_point(&mut self, source: Source, Point { step, unix_seconds, values }: Point) {
        let unix_milliseconds = (unix_seconds * 1000.0) as i64;
        for (name, value) in values {
            let key = key(source, &name);
            let sent = self.positions.get(&key).copied();
            let curve = self.curves.entry(key).or_insert_with(|| Curve { source, waiting: VecDeque::new() });
            let last = curve.waiting.back().map(|value| value.step).or(sent);
            if last.is_none_or(|last| last < step) {
                curve.waiting.push_back(Value { step, unix_milliseconds, value });
            }
        }
    }

    /// Returns the values to send next, at most [`MOST_AT_ONCE`], those of each metric in the order of their steps; none if
    /// the run has all that may be sent.
    pub fn next(&self, durable: &Durable) -> Vec<Metric> {
        let metrics = self.curves.iter().flat_map(|(key, curve)| {
            let ready = curve.waiting.iter().take_while(move |value| durable.has(curve.source, value.step));
            ready.map(move |Value { step, unix_milliseconds, value }| Metric {
                key: key.clone(),
                step: *step,
                unix_milliseconds: *unix_milliseconds,
                value: *value,
            })
        });
        metrics.take(MOST_AT_ONCE).collect()
    }

    /// Returns whether more is to be read. Where values may be sent all is read first: a source that goes back takes back values
    /// that wait.
    pub fn has_room(&self, durable: &Durable) -> bool {
        let waiting: usize = self.curves.values().map(|curve| curve.waiting.len()).sum();
        let is_ready = |curve: &Curve| curve.waiting.front().is_some_and(|value| durable.has(curve.source, value.step));
        waiting < MOST_WAITING || self.curves.values().any(is_ready)
    }

    /// Records that the run has `metrics`, as [`Backlog::next`] gave them.
    pub fn sent(&mut self, metrics: Vec<Metric>) {
        for Metric { key, step, .. } in metrics {
            if let Some(curve) = self.curves.get_mut(&key) {
                let known = curve.waiting.partition_point(|value| value.step <= step);
                curve.waiting.drain(..known);
            }
            self.positions.insert(key, step);
        }
    }
}

/// Returns the name in the run of a metric: MLflow groups by what stands before a slash. It takes letters, digits, `_`, `-`,
/// `.`, spaces and slashes, the latter as a path. Of another name each other letter becomes `_`, and a sum of the whole name
/// follows, so that no two names are made one.
fn key(source: Source, name: &str) -> String {
    let is_taken = |letter: char| letter.is_ascii_alphanumeric() || "_-. /".contains(letter);
    let is_path = name.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if is_path && name.chars().all(is_taken) {
        return format!("{source}/{name}");
    }
    let replaced: String =
        name.chars().map(|letter| if is_taken(letter) && letter != '/' { letter } else { '_' }).collect();
    format!("{source}/{replaced}-{:08x}", crc32fast::hash(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source::Trainer(0);

    fn point(step: u64, values: &[(&str, f32)]) -> Entry {
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Entry::Point(Point { step, unix_seconds: 1.5, values })
    }

    fn losses(steps: std::ops::Range<u64>) -> Vec<Entry> {
        steps.map(|step| point(step, &[("loss", step as f32)])).collect()
    }

    /// Name and step of each value to send.
    fn next(backlog: &Backlog, durable: &Durable) -> Vec<(String, u64)> {
        backlog.next(durable).into_iter().map(|metric| (metric.key, metric.step)).collect()
    }

    fn steps(backlog: &Backlog, durable: &Durable) -> Vec<u64> {
        next(backlog, durable).into_iter().map(|(_, step)| step).collect()
    }

    #[test]
    fn what_the_run_has_is_not_sent_again() {
        let up_to = |step| Durable::UpTo(vec![step]);
        for (label, position, entries, durable, wanted) in [
            ("a new run", None, losses(1..4), Durable::All, vec![1, 2, 3]),
            ("a step of 0", None, losses(0..1), Durable::All, vec![0]),
            ("one that has some", Some(2), losses(1..4), Durable::All, vec![3]),
            ("no checkpoint", None, losses(1..4), Durable::Nothing, vec![]),
            ("a checkpoint", None, losses(1..4), up_to(2), vec![1, 2]),
            ("all were sent", Some(9), losses(1..4), up_to(2), vec![]),
            (
                "steps that are made again",
                Some(1),
                [losses(1..4), vec![Entry::Rewind(1)], losses(2..3)].concat(),
                Durable::All,
                vec![2],
            ),
            (
                "steps that are made again after they were sent",
                Some(3),
                [losses(1..4), vec![Entry::Rewind(1)], losses(2..6)].concat(),
                Durable::All,
                vec![4, 5],
            ),
            ("points that come twice", None, [losses(1..3), losses(1..4)].concat(), Durable::All, vec![1, 2, 3]),
        ] {
            let positions = position.map(|step| ("trainer-0/loss".to_owned(), step)).into_iter().collect();
            let mut backlog = Backlog::new(positions);
            entries.into_iter().for_each(|entry| backlog.take(SOURCE, entry));
            assert_eq!(steps(&backlog, &durable), wanted, "{label}");
        }
    }

    #[test]
    fn values_go_in_pieces_and_each_once() {
        let mut backlog = Backlog::default();
        let count = MOST_AT_ONCE as u64;
        losses(0..count).into_iter().for_each(|entry| backlog.take(SOURCE, entry));
        backlog.take(Source::Job, point(7, &[("trainers", 2.0), ("staleness", f32::NAN)]));
        backlog.take(Source::Trainer(1), Entry::Rewind(0));
        let mut all = Vec::new();
        loop {
            let metrics = backlog.next(&Durable::All);
            if metrics.is_empty() {
                break;
            }
            assert!(metrics.len() <= MOST_AT_ONCE);
            all.extend(metrics.iter().map(|metric| (metric.key.clone(), metric.step)));
            backlog.sent(metrics);
        }
        let job = ["job/staleness", "job/trainers"].map(|key| (key.to_owned(), 7));
        let losses = (0..count).map(|step| ("trainer-0/loss".to_owned(), step));
        assert_eq!(all, job.into_iter().chain(losses).collect::<Vec<_>>());
        // They were sent, and do not come back.
        backlog.take(Source::Job, point(7, &[("trainers", 3.0)]));
        assert!(next(&backlog, &Durable::All).is_empty());
    }

    #[test]
    fn a_backlog_is_full_while_nothing_of_it_may_be_sent() {
        let most = MOST_WAITING as u64;
        for (label, steps, durable, wanted) in [
            ("little waits", 1..9, Durable::Nothing, true),
            ("much waits for a checkpoint", 1..most + 1, Durable::Nothing, false),
            ("the checkpoint was before", 5..most + 5, Durable::UpTo(vec![4]), false),
            ("there is a checkpoint", 1..most + 1, Durable::UpTo(vec![1]), true),
            ("the job is over", 1..most + 1, Durable::All, true),
        ] {
            let mut backlog = Backlog::default();
            losses(steps).into_iter().for_each(|entry| backlog.take(SOURCE, entry));
            assert_eq!(backlog.has_room(&durable), wanted, "{label}");
        }
    }

    #[test]
    fn names_are_those_that_mlflow_takes() {
        for (name, wanted) in [
            ("loss", "trainer-0/loss"),
            ("val/top-5 acc.", "trainer-0/val/top-5 acc."),
            ("f1@0.5", "trainer-0/f1_0.5-"),
            ("a//b", "trainer-0/a__b-"),
            ("..", "trainer-0/..-"),
            ("größe", "trainer-0/gr__e-"),
        ] {
            let found = key(SOURCE, name);
            assert!(found.starts_with(wanted) && (found == wanted) != wanted.ends_with('-'), "{name}: {found}");
            assert!(found.len() <= 250);
        }
        assert_ne!(key(SOURCE, "a?"), key(SOURCE, "a!"));
        assert_eq!(key(Source::Job, "trainers"), "job/trainers");
    }
}
