//! How many requests are under way at once, over all jobs: enough to hide the latency, few enough to leave
//! the API server to others (it takes 200 writes at once by default). Each is a connection.
//!
//! When many jobs begin or end together, what somebody waits for comes first: ends of jobs, then pods, then other
//! statuses, then events. A status costs the API server as much as several pods.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// How long a write lets those before it pass. After that it goes, but one at a time.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// What is written, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Write {
    /// The status of a job that has succeeded or failed.
    End,
    /// A pod, or another child, that is created or deleted; a status that a deletion waits for.
    Child,
    /// Any other status.
    Status,
    Event,
}

/// Turns by what is written.
pub struct Turns {
    lanes: [Lane; 4],
    /// For one that has waited long enough.
    late: Semaphore,
    /// Rings when nobody waits in a lane any more.
    empty: Notify,
    patience: Duration,
}

struct Lane {
    permits: Semaphore,
    /// Writes that wait for their turn.
    waiting: AtomicUsize,
}

/// The right to write, until it is dropped.
pub struct Turn<'a>(#[expect(dead_code, reason = "held")] [Option<SemaphorePermit<'a>>; 2]);

/// One that waits; also one that gives up waiting is counted out.
struct Waiting<'a>(&'a Turns, &'a Lane);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.1.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.empty.notify_waiters();
        }
    }
}

impl Default for Turns {
    fn default() -> Self {
        let lane = |permits| Lane { permits: Semaphore::new(permits), waiting: AtomicUsize::new(0) };
        let lanes = [lane(16), lane(64), lane(8), lane(4)];
        Self { lanes, late: Semaphore::new(1), empty: Notify::new(), patience: PATIENCE }
    }
}

impl Turns {
    /// Waits for the turn to write this. Cancel-safe.
    pub async fn turn(&self, write: Write) -> Turn<'_> {
        let (before, lane) = (&self.lanes[..write as usize], &self.lanes[write as usize]);
        lane.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(self, lane);
        // More of the others than the API server takes in that time: this cannot wait for all.
        let late = match tokio::time::timeout(self.patience, self.until_empty(before)).await {
            Ok(()) => None,
            Err(_) => Some(acquire(&self.late).await),
        };
        Turn([late, Some(acquire(&lane.permits).await)])
    }

    /// The turn to write this, if it is now.
    pub fn turn_now(&self, write: Write) -> Option<Turn<'_>> {
        let (before, lane) = (&self.lanes[..write as usize], &self.lanes[write as usize]);
        let permit = lane.permits.try_acquire().ok().filter(|_| are_empty(before))?;
        Some(Turn([None, Some(permit)]))
    }

    async fn until_empty(&self, lanes: &[Lane]) {
        loop {
            // Before the look, so that a ring in between is not missed.
            let rung = self.empty.notified();
            if are_empty(lanes) {
                return;
            }
            rung.await;
        }
    }
}

fn are_empty(lanes: &[Lane]) -> bool {
    lanes.iter().all(|lane| lane.waiting.load(Ordering::Acquire) == 0)
}

async fn acquire(permits: &Semaphore) -> SemaphorePermit<'_> {
    permits.acquire().await.expect("nobody closes it")
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn what_is_less_urgent_waits_for_those_that_wait_but_not_for_ever() {
        let patience = Duration::from_millis(20);
        let turns = Turns { patience, ..Turns::default() };
        let mut under_way = Vec::new();
        for _ in 0..64 {
            under_way.push(turns.turn(Write::Child).await);
        }
        assert!(
            turns.turn(Write::Status).now_or_never().is_some(),
            "children that are being written are not in the way"
        );
        let mut next = Box::pin(turns.turn(Write::Child));
        assert!(next.as_mut().now_or_never().is_none(), "64 are under way");
        assert!(turns.turn(Write::End).now_or_never().is_some(), "an end waits for nobody");
        assert!(turns.turn_now(Write::Status).is_none(), "a child waits");
        let mut status = Box::pin(turns.turn(Write::Status));
        assert!(status.as_mut().now_or_never().is_none(), "a child waits");
        let mut event = Box::pin(turns.turn(Write::Event));
        assert!(event.as_mut().now_or_never().is_none(), "a child and a status wait");
        under_way.pop();
        let _child = next.await;
        drop(status.await);
        drop(event.await);
        assert!(turns.turn_now(Write::Status).is_some(), "nobody waits any more");

        let mut next = Box::pin(turns.turn(Write::Child));
        assert!(next.as_mut().now_or_never().is_none());
        let late = turns.turn(Write::Status).await;
        assert!(next.as_mut().now_or_never().is_none(), "it is still there; the status has waited long enough");
        let second = tokio::time::timeout(patience * 3, turns.turn(Write::Status)).await;
        assert!(second.is_err(), "late ones go one at a time");
        drop(late);
        drop(turns.turn(Write::Status).await);
        drop(next);
        assert!(turns.turn(Write::Status).now_or_never().is_some(), "one that gave up waiting is in nobody's way");
    }
}
