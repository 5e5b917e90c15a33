//! How many requests are under way at once, over all jobs: enough to hide the latency, few enough to leave
//! the API server to others (it takes 200 writes at once by default). Each is a connection.
//!
//! When many jobs begin or end together, what somebody waits for comes first: ends of jobs, then pods, then other
//! statuses, then events. A status costs the API server as much as several pods, so it does not go beside them either. Jobs
//! that end together do so in gusts, and events fill no gap between these: they wait until no more end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::controller::decide::timing::WRITE_TIMEOUT;

/// How long after a job's end events wait whether another ends.
const LULL: Duration = Duration::from_millis(500);

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
    /// Rings when a lane becomes free: when nobody waits in it any more, and when nobody writes in it any more.
    free: Notify,
    patience: Duration,
    lull: Duration,
    /// Until then events wait whether another job ends.
    lull_over: Mutex<Instant>,
}

struct Lane {
    permits: Semaphore,
    size: usize,
    /// Writes that wait for their turn.
    waiting: AtomicUsize,
}

impl Lane {
    fn new(size: usize) -> Self {
        Self { permits: Semaphore::new(size), size, waiting: AtomicUsize::new(0) }
    }

    fn is_idle(&self) -> bool {
        self.permits.available_permits() == self.size
    }

    /// Whether a less urgent write may go.
    fn lets(&self, write: Write) -> bool {
        let nobody_misses_it = write >= Write::Status;
        self.waiting.load(Ordering::Acquire) == 0 && (!nobody_misses_it || self.is_idle())
    }
}

/// The right to write, until it is dropped.
pub struct Turn<'a> {
    turns: &'a Turns,
    write: Write,
    permit: Option<SemaphorePermit<'a>>,
    _late: Option<SemaphorePermit<'a>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.permit = None;
        if self.write == Write::End {
            *self.turns.lull_over.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + self.turns.lull;
        }
        if self.turns.lane(self.write).is_idle() {
            self.turns.free.notify_waiters();
        }
    }
}

/// One that waits; also one that gives up waiting is counted out.
struct Waiting<'a>(&'a Turns, &'a Lane);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.1.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.free.notify_waiters();
        }
    }
}

impl Default for Turns {
    fn default() -> Self {
        let lanes = [16, 64, 8, 4].map(Lane::new);
        let lull_over = Mutex::new(Instant::now());
        Self { lanes, late: Semaphore::new(1), free: Notify::new(), patience: WRITE_TIMEOUT, lull: LULL, lull_over }
    }
}

impl Turns {
    /// Waits for the turn to write this. Cancel-safe.
    pub async fn turn(&self, write: Write) -> Turn<'_> {
        let lane = self.lane(write);
        lane.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(self, lane);
        // More of the others than the API server takes in that time: this cannot wait for all.
        let late = match timeout(self.patience, self.until_free(write)).await {
            Ok(()) => None,
            Err(_) => Some(acquire(&self.late).await),
        };
        Turn { turns: self, write, permit: Some(acquire(&lane.permits).await), _late: late }
    }

    /// The turn to write this, if it is now.
    pub fn turn_now(&self, write: Write) -> Option<Turn<'_>> {
        let is_free = self.rest_of_lull(write).is_none() && self.lanes_let(write);
        let permit = is_free.then(|| self.lane(write).permits.try_acquire().ok())??;
        Some(Turn { turns: self, write, permit: Some(permit), _late: None })
    }

    async fn until_free(&self, write: Write) {
        loop {
            // Before the look, so that a ring in between is not missed.
            let rung = self.free.notified();
            match self.rest_of_lull(write) {
                // Time alone ends it.
                Some(lull) => _ = timeout(lull, rung).await,
                None if self.lanes_let(write) => return,
                None => rung.await,
            }
        }
    }

    /// How long an event still waits whether another job ends.
    fn rest_of_lull(&self, write: Write) -> Option<Duration> {
        if write != Write::Event {
            return None;
        }
        let over = *self.lull_over.lock().unwrap_or_else(PoisonError::into_inner);
        over.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    fn lane(&self, write: Write) -> &Lane {
        &self.lanes[write as usize]
    }

    /// Whether the lanes before that of `write` let it go.
    fn lanes_let(&self, write: Write) -> bool {
        self.lanes[..write as usize].iter().all(|lane| lane.lets(write))
    }
}

async fn acquire(permits: &Semaphore) -> SemaphorePermit<'_> {
    permits.acquire().await.expect("nobody closes it")
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn what_nobody_waits_for_goes_when_nothing_more_urgent_is_under_way() {
        let turns = Turns::default();
        let end = turns.turn(Write::End).await;
        let child = turns.turn(Write::Child).now_or_never().expect("an end that is being written is in nobody's way");
        assert!(turns.turn_now(Write::Status).is_none(), "an end and a child are under way");
        let mut status = Box::pin(turns.turn(Write::Status));
        assert!(status.as_mut().now_or_never().is_none(), "an end and a child are under way");
        let mut event = Box::pin(turns.turn(Write::Event));
        assert!(event.as_mut().now_or_never().is_none(), "the same");
        drop(end);
        assert!(status.as_mut().now_or_never().is_none(), "a child is under way");
        drop(child);
        let first = status.now_or_never().expect("nothing is under way");
        let second = turns.turn_now(Write::Status).expect("others of its kind are not in its way");
        assert!(event.as_mut().now_or_never().is_none(), "two statuses are under way");
        drop((first, second));
        event.await;
    }

    #[tokio::test]
    async fn events_wait_until_no_more_jobs_end() {
        let turns = Turns { lull: Duration::from_hours(1), ..Turns::default() };
        drop(turns.turn(Write::End).await);
        assert!(turns.turn(Write::Status).now_or_never().is_some(), "others do not wait");
        assert!(turns.turn_now(Write::Event).is_none(), "another may end");
        assert!(turns.turn(Write::Event).now_or_never().is_none(), "the same");

        let turns = Turns { lull: Duration::from_millis(20), ..Turns::default() };
        let begin = Instant::now();
        drop(turns.turn(Write::End).await);
        drop(turns.turn(Write::Event).await);
        assert!(begin.elapsed() >= turns.lull && begin.elapsed() < turns.patience, "{:?}", begin.elapsed());
    }

    #[tokio::test]
    async fn what_is_less_urgent_waits_for_those_that_wait() {
        let turns = Turns::default();
        let mut under_way = Vec::new();
        for _ in 0..16 {
            under_way.push(turns.turn(Write::End).await);
        }
        let mut next = Box::pin(turns.turn(Write::End));
        assert!(next.as_mut().now_or_never().is_none(), "16 are under way");
        let mut child = Box::pin(turns.turn(Write::Child));
        assert!(child.as_mut().now_or_never().is_none(), "an end waits");
        under_way.pop();
        let _next = next.now_or_never().expect("one of them is written");
        assert!(child.now_or_never().is_some(), "no end waits any more");
        let mut next = Box::pin(turns.turn(Write::End));
        assert!(next.as_mut().now_or_never().is_none());
        drop(next);
        assert!(turns.turn(Write::Child).now_or_never().is_some(), "one that gave up waiting is in nobody's way");
    }

    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let patience = Duration::from_millis(20);
        let turns = Turns { patience, ..Turns::default() };
        let child = turns.turn(Write::Child).await;
        let late = turns.turn(Write::Status).await;
        let second = tokio::time::timeout(patience * 3, turns.turn(Write::Status)).await;
        assert!(second.is_err(), "late ones go one at a time");
        drop(late);
        drop(turns.turn(Write::Status).await);
        drop(child);
        assert!(turns.turn(Write::Status).now_or_never().is_some(), "the child is written");
    }
}
