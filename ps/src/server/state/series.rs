//! Takes the points of metrics that trainers send, for the task that writes the job's series.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::proto::{HeartbeatReply, MetricPoint};
use crate::series::Source;
use crate::series::event_file::Point;
use crate::series::writer::Entry;

/// Pieces that may wait for the disk at least, each with the points of one heartbeat. Trainers keep what comes meanwhile.
const WAITING: usize = 16;

/// A piece of a source's series.
#[derive(Debug)]
pub struct Piece {
    pub source: Source,
    pub entries: Vec<Entry>,
    /// The stay of the trainer that it comes from, and the number of the first point that it does not have.
    pub(in crate::server) until: (u64, u64),
}

/// The points on their way to the disk.
#[derive(Debug)]
pub struct Series {
    pieces: mpsc::Sender<Piece>,
    waiting: Mutex<Option<mpsc::Receiver<Piece>>>,
    trainers: Mutex<BTreeMap<u32, Counts>>,
}

/// How far the series of one trainer has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Counts how often the trainer has joined this server.
    stay: u64,
    /// The process of the trainer that has joined last.
    incarnation: u32,
    /// Points since it joined with lower numbers than this were received.
    received: u64,
    /// Points with lower numbers than this are durable.
    kept: u64,
}

impl Default for Series {
    fn default() -> Self {
        Self::for_trainers(1)
    }
}

impl Series {
    /// Has room for a piece of each trainer: their heartbeats come in the same second, and one without room is sent again ten
    /// times a second.
    pub fn for_trainers(trainers: u32) -> Self {
        let (pieces, waiting) = mpsc::channel(WAITING.max(trainers as usize));
        Self { pieces, waiting: Mutex::new(Some(waiting)), trainers: Mutex::default() }
    }

    /// Begins a stay of a trainer, which may be another process than before: it sends all points again that it holds.
    pub fn joined(&self, trainer: u32, incarnation: u32) {
        let mut trainers = self.trainers.lock();
        let counts = trainers.entry(trainer).or_default();
        *counts = Counts { stay: counts.stay + 1, incarnation, ..Counts::default() };
    }

    /// Takes the points that a process of a trainer sends, which holds those from `held` on. The answer says which ones this
    /// process has. Those that it has no room for are sent again, as are all that it lacks of those that it would have to have: a
    /// process before this one has answered for them. Takes nothing of a process that was replaced meanwhile.
    pub fn take(&self, (trainer, incarnation): (u32, u32), points: Vec<MetricPoint>, held: u64) -> HeartbeatReply {
        let mut trainers = self.trainers.lock();
        let counts = trainers.entry(trainer).or_default();
        if counts.incarnation != incarnation {
            return HeartbeatReply::default();
        }
        counts.received = counts.received.max(held);
        let follows = points.first().is_some_and(|first| first.number <= counts.received);
        let received = points.last().map_or(0, |last| last.number.saturating_add(1));
        if follows && received > counts.received {
            let entries = points.into_iter().filter(|point| point.number >= counts.received).map(entry).collect();
            let piece = Piece { source: Source::Trainer(trainer), entries, until: (counts.stay, received) };
            if self.pieces.try_send(piece).is_ok() {
                counts.received = received;
            }
        }
        HeartbeatReply { points_received: counts.received, points_kept: counts.kept, ..HeartbeatReply::default() }
    }

    /// Returns the answer of a server that keeps no series, so that trainers hold nothing for it.
    pub const fn none() -> HeartbeatReply {
        HeartbeatReply {
            points_received: u64::MAX,
            points_kept: u64::MAX,
            holders: Vec::new(),
            finished_trainers: Vec::new(),
        }
    }

    /// Returns the pieces, once.
    pub fn pieces(&self) -> Option<mpsc::Receiver<Piece>> {
        self.waiting.lock().take()
    }

    /// Records that the points of `trainer` before those of `until` are durable.
    pub fn kept(&self, trainer: u32, (stay, number): (u64, u64)) {
        if let Some(counts) = self.trainers.lock().get_mut(&trainer).filter(|counts| counts.stay == stay) {
            counts.kept = counts.kept.max(number);
        }
    }
}

fn entry(point: MetricPoint) -> Entry {
    let MetricPoint { step, unix_seconds, values, rewinds, .. } = point;
    if rewinds {
        return Entry::Rewind(step);
    }
    let values = values.into_iter().filter_map(|value| Some((value.name, value.value?))).collect();
    Entry::Point(Point { step, unix_seconds, values })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(numbers: std::ops::Range<u64>) -> Vec<MetricPoint> {
        numbers.map(|number| MetricPoint { number, step: number, ..MetricPoint::default() }).collect()
    }

    #[test]
    fn a_point_is_taken_once_in_each_stay_of_a_trainer() {
        let series = Series::default();
        let mut pieces = series.pieces().expect("they are taken for the first time");
        let mut taken = |trainer, sent| {
            let HeartbeatReply { points_received, points_kept, .. } = series.take((trainer, 0), sent, 0);
            let steps = |entry| match entry {
                Entry::Point(point) => point.step,
                Entry::Rewind(step) => step,
            };
            let entries = pieces.try_recv().map(|piece| piece.entries.into_iter().map(steps).collect::<Vec<_>>());
            (points_received, points_kept, entries.unwrap_or_default())
        };
        series.joined(0, 0);
        assert_eq!(taken(0, points(0..0)), (0, 0, vec![]));
        assert_eq!(taken(0, points(0..2)), (2, 0, vec![0, 1]));
        assert_eq!(taken(0, points(0..3)), (3, 0, vec![2]));
        series.kept(0, (1, 2));
        assert_eq!(taken(0, points(0..3)), (3, 2, vec![]));
        assert_eq!(taken(1, points(0..1)), (1, 0, vec![0]));
        // The counts of those that it sent before it joined again say nothing about these.
        series.joined(0, 0);
        assert_eq!(taken(0, points(0..1)), (1, 0, vec![0]));
        series.kept(0, (1, 3));
        assert_eq!(taken(0, points(1..1)), (1, 0, vec![]));
    }

    #[test]
    fn points_are_taken_only_behind_those_that_are_there() {
        let series = Series::default();
        series.joined(0, 0);
        // A process before this one has answered for 0 to 3, and they were not durable.
        assert_eq!(series.take((0, 0), points(4..6), 0).points_received, 0);
        assert_eq!(series.take((0, 0), points(0..6), 0).points_received, 6);
        series.joined(0, 0);
        // These were.
        assert_eq!(series.take((0, 0), points(4..6), 4).points_received, 6);
    }

    #[test]
    fn a_process_of_a_trainer_that_was_replaced_says_nothing_of_the_next_ones_points() {
        let series = Series::default();
        series.joined(0, 0);
        series.joined(0, 1);
        assert_eq!(series.take((0, 0), points(50..60), 50), HeartbeatReply::default(), "it was heard late");
        assert_eq!(series.take((0, 1), points(0..2), 0).points_received, 2);
    }

    #[test]
    fn points_that_find_no_room_are_not_received() {
        let series = Series::default();
        let answers: Vec<u64> =
            (0..WAITING as u64 + 1).map(|n| series.take((0, 0), points(n..n + 1), 0).points_received).collect();
        assert_eq!(answers[WAITING - 1..], [WAITING as u64, WAITING as u64]);
    }
}
