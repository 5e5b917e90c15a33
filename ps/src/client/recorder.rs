//! A trainer's metrics on their way to server 0, which keeps the series of the job.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::unix_seconds;
use crate::proto::{HeartbeatReply, MetricPoint, MetricValue};

/// Points that a trainer holds at most. Of more that server 0 does not take, the oldest go.
const MOST_HELD: usize = 100_000;
/// Points in one heartbeat at most.
const MOST_SENT: usize = 10_000;

/// Takes the values of metrics of each step. Clones record to the same series.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Points>>);

impl Recorder {
    /// Records values of metrics, for example the loss, when `step` steps are done. The steps of each metric must increase,
    /// except after the servers went back; a value at a step that has one is left out.
    pub fn record(&self, step: u64, metrics: &BTreeMap<String, f64>) {
        let value = |(name, value): (&String, &f64)| MetricValue { name: name.clone(), value: Some(*value as f32) };
        let values = metrics.iter().map(value).collect();
        self.0.lock().push(MetricPoint { step, unix_seconds: unix_seconds(), values, ..MetricPoint::default() });
    }

    /// Discards the points above `step`: this trainer begins there, or begins there again.
    pub fn begin_at(&self, step: u64) {
        let mut points = self.0.lock();
        points.push(MetricPoint { step, rewinds: true, ..MetricPoint::default() });
    }

    /// Returns the points that server 0 does not have, the oldest first, and the number of the first that this trainer holds.
    pub(super) fn to_send(&self) -> (Vec<MetricPoint>, u64) {
        let points = self.0.lock();
        (points.to_send(), points.first_held())
    }

    /// Takes what server 0 answers.
    pub(super) fn answered(&self, reply: &HeartbeatReply) {
        self.0.lock().answered(reply.points_received, reply.points_kept);
    }

    /// Returns whether server 0 has all points.
    pub(super) fn is_sent(&self) -> bool {
        let points = self.0.lock();
        points.sent == points.next
    }
}

/// The points that server 0 does not keep yet.
#[derive(Debug, Default)]
struct Points {
    held: VecDeque<MetricPoint>,
    /// The number of the next point.
    next: u64,
    /// The number of the first point that server 0 does not have.
    sent: u64,
    /// Points were lost, and the log says so.
    lost: bool,
}

impl Points {
    fn push(&mut self, point: MetricPoint) {
        self.held.push_back(MetricPoint { number: self.next, ..point });
        self.next += 1;
        if self.held.len() > MOST_HELD {
            self.held.pop_front();
            if !std::mem::replace(&mut self.lost, true) {
                tracing::warn!(
                    "server 0 has not kept the last {MOST_HELD} points of metrics, so that the oldest are lost"
                );
            }
        }
    }

    fn to_send(&self) -> Vec<MetricPoint> {
        let first = self.held.partition_point(|point| point.number < self.sent);
        self.held.range(first..).take(MOST_SENT).cloned().collect()
    }

    fn first_held(&self) -> u64 {
        self.held.front().map_or(self.next, |point| point.number)
    }

    /// Server 0 has the points before `received`, and they are durable before `kept`. A process of it that was started anew has
    /// none, and gets again what is held.
    fn answered(&mut self, received: u64, kept: u64) {
        self.sent = received.min(self.next);
        while self.held.front().is_some_and(|point| point.number < kept) {
            self.held.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(steps: std::ops::Range<u64>) -> Points {
        let mut points = Points::default();
        steps.for_each(|step| points.push(MetricPoint { step, ..MetricPoint::default() }));
        points
    }

    fn steps(points: &Points) -> Vec<u64> {
        points.to_send().iter().map(|point| point.step).collect()
    }

    #[test]
    fn points_are_sent_until_they_are_received_and_held_until_they_are_kept() {
        let mut points = recorded(0..4);
        for (received, kept, sent, held) in [
            (0, 0, vec![0, 1, 2, 3], 4),
            (3, 0, vec![3], 4),
            (4, 2, vec![], 2),
            // Another process of server 0.
            (0, 0, vec![2, 3], 2),
            (4, 4, vec![], 0),
            // A server that keeps no series.
            (u64::MAX, u64::MAX, vec![], 0),
        ] {
            points.answered(received, kept);
            assert_eq!((steps(&points), points.held.len()), (sent, held), "after {received}, {kept}");
            assert_eq!(points.first_held(), 4 - held as u64, "after {received}, {kept}");
        }
        points.push(MetricPoint { step: 9, ..MetricPoint::default() });
        assert_eq!(steps(&points), [9]);
    }

    #[test]
    fn a_heartbeat_and_a_trainer_have_room_for_so_many_points_only() {
        let mut points = recorded(0..MOST_HELD as u64 + 3);
        assert_eq!((points.held.len(), points.lost), (MOST_HELD, true));
        assert_eq!((steps(&points).len(), steps(&points)[0]), (MOST_SENT, 3));
        points.answered(3 + MOST_SENT as u64, 0);
        assert_eq!(steps(&points)[0], 3 + MOST_SENT as u64);
    }
}
