//! A trainer's metrics on their way to server 0, which keeps the series of the job.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use prost::Message as _;

use crate::clock::unix_seconds;
use crate::proto::{HeartbeatReply, MetricPoint, MetricValue};
use crate::series::{LONGEST_NAME, MOST_METRICS};

/// Points that a trainer holds at most. Of more that server 0 does not take, the oldest go.
const MOST_HELD: usize = 100_000;
/// Points in one heartbeat at most.
const MOST_SENT: usize = 10_000;
/// Bytes of them at most, a quarter of the longest message that a server takes: it would refuse every heartbeat.
const MOST_BYTES: usize = 1 << 20;

/// Bytes for the field's number and length before each point.
const LENGTH: usize = 4;

/// Takes the values of metrics of each step. Clones record to the same series.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Points>>);

impl Recorder {
    /// Records values of metrics, for example the loss, when `step` steps are done. The steps of each metric must increase,
    /// except after the servers went back; a value at a step that has one is left out.
    pub fn record(&self, step: u64, metrics: &BTreeMap<String, f64>) {
        let value = |(name, value): (&String, &f64)| MetricValue { name: name.clone(), value: Some(*value as f32) };
        // Server 0 would leave the others out.
        let fitting = metrics.iter().filter(|(name, _)| name.len() <= LONGEST_NAME).take(MOST_METRICS);
        let values = fitting.map(value).collect();
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

    /// Takes what server 0 answers; returns whether it has taken points.
    pub(super) fn answered(&self, reply: &HeartbeatReply) -> bool {
        let mut points = self.0.lock();
        let before = points.sent;
        points.answered(reply.points_received, reply.points_kept);
        points.sent > before
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
        let mut bytes = 0;
        let fits = |point: &&MetricPoint| {
            bytes += point.encoded_len() + LENGTH;
            bytes <= MOST_BYTES
        };
        self.held.range(first..).take(MOST_SENT).take_while(fits).cloned().collect()
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
    use crate::proto::HeartbeatRequest;

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

    #[test]
    fn a_heartbeat_with_the_longest_points_is_no_longer_than_a_server_takes() {
        let recorder = Recorder::default();
        let long = |n: usize| (format!("{n:0LONGEST_NAME$}"), 1.0);
        let metrics: BTreeMap<_, _> = (0..MOST_METRICS + 8).map(long).chain([("n".repeat(129), 1.0)]).collect();
        (0..1000).for_each(|step| recorder.record(step, &metrics));
        let (points, _) = recorder.to_send();
        assert!(points.len() > 100 && points.iter().all(|point| point.values.len() == MOST_METRICS));
        let message = HeartbeatRequest { points, ..HeartbeatRequest::default() };
        assert!(message.encoded_len() <= MOST_BYTES, "{} bytes", message.encoded_len());
    }
}
