//! The order in which writes are sent to the API server, and how many of them at a time: enough to hide the latency, few
//! enough to leave the API server to others (it takes 200 writes at once by default). Each is a connection.
//!
//! When many jobs begin or end together, urgent writes come first: terminal statuses, then creations and deletions of
//! children, then other statuses, then events. A status costs the API server as much as several pods, so it is not sent
//! beside them either. Jobs that end together end in bursts; events wait for a quiet period after the last terminal
//! status, so that they do not compete with the rest of a burst.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::controller::decide::timing::WRITE_TIMEOUT;

/// How long events wait after a terminal status for another one.
const QUIET_PERIOD: Duration = Duration::from_millis(500);

/// Kinds of writes, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritePriority {
    /// The status of a job that has succeeded or failed.
    TerminalStatus,
    /// A pod, or another child, that is created or deleted; a status that a deletion waits for.
    Child,
    /// Any other status.
    Status,
    Event,
}

/// Grants permits to write, by priority.
pub struct PriorityLimiter {
    levels: [Level; 4],
    /// The permit of the one overdue write that may be under way.
    overdue: Semaphore,
    /// Notified when a level has no more waiting writes, and when it has no more writes under way.
    free: Notify,
    timeout: Duration,
    quiet_period: Duration,
    /// End of the quiet period: until then events wait for other terminal statuses.
    quiet_until: Mutex<Instant>,
}

/// The writes of one priority.
struct Level {
    permits: Semaphore,
    size: usize,
    /// Number of writes that wait for a permit.
    waiting: AtomicUsize,
}

impl Level {
    fn new(size: usize) -> Self {
        Self { permits: Semaphore::new(size), size, waiting: AtomicUsize::new(0) }
    }

    fn is_idle(&self) -> bool {
        self.permits.available_permits() == self.size
    }

    /// Returns whether a less urgent write may be sent.
    fn allows(&self, write: WritePriority) -> bool {
        let can_wait = write >= WritePriority::Status;
        self.waiting.load(Ordering::Acquire) == 0 && (!can_wait || self.is_idle())
    }
}

/// The right to write, until it is dropped.
pub struct Permit<'a> {
    limiter: &'a PriorityLimiter,
    write: WritePriority,
    permit: Option<SemaphorePermit<'a>>,
    _overdue: Option<SemaphorePermit<'a>>,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.permit = None;
        if self.write == WritePriority::TerminalStatus {
            let quiet_until = Instant::now() + self.limiter.quiet_period;
            *self.limiter.quiet_until.lock() = quiet_until;
        }
        if self.limiter.level(self.write).is_idle() {
            self.limiter.free.notify_waiters();
        }
    }
}

/// Counts a waiting write; when it is dropped, also by a write that gives up, the write counts no more.
struct Waiting<'a>(&'a PriorityLimiter, &'a Level);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.1.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.free.notify_waiters();
        }
    }
}

impl Default for PriorityLimiter {
    fn default() -> Self {
        Self {
            levels: [16, 64, 8, 4].map(Level::new),
            overdue: Semaphore::new(1),
            free: Notify::new(),
            timeout: WRITE_TIMEOUT,
            quiet_period: QUIET_PERIOD,
            quiet_until: Mutex::new(Instant::now()),
        }
    }
}

impl PriorityLimiter {
    /// Waits for the permit to write. Cancel-safe.
    pub async fn permit(&self, write: WritePriority) -> Permit<'_> {
        let level = self.level(write);
        level.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(self, level);
        // After the timeout there are more urgent writes than the API server takes in that time: this cannot wait for all.
        let overdue = match timeout(self.timeout, self.until_free(write)).await {
            Ok(()) => None,
            Err(_) => Some(acquire(&self.overdue).await),
        };
        Permit { limiter: self, write, permit: Some(acquire(&level.permits).await), _overdue: overdue }
    }

    /// Returns the permit to write if no wait is needed.
    pub fn try_permit(&self, write: WritePriority) -> Option<Permit<'_>> {
        let is_free = self.rest_of_quiet_period(write).is_none() && self.higher_levels_allow(write);
        let permit = is_free.then(|| self.level(write).permits.try_acquire().ok())??;
        Some(Permit { limiter: self, write, permit: Some(permit), _overdue: None })
    }

    async fn until_free(&self, write: WritePriority) {
        loop {
            // Before the check, so that a notification in between is not missed.
            let notified = self.free.notified();
            match self.rest_of_quiet_period(write) {
                // Its end is not notified.
                Some(rest) => _ = timeout(rest, notified).await,
                None if self.higher_levels_allow(write) => return,
                None => notified.await,
            }
        }
    }

    /// Returns how long an event still waits for another terminal status.
    fn rest_of_quiet_period(&self, write: WritePriority) -> Option<Duration> {
        if write != WritePriority::Event {
            return None;
        }
        let end = *self.quiet_until.lock();
        end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    fn level(&self, write: WritePriority) -> &Level {
        &self.levels[write as usize]
    }

    /// Returns whether all more urgent levels let `write` be sent.
    fn higher_levels_allow(&self, write: WritePriority) -> bool {
        self.levels[..write as usize].iter().all(|level| level.allows(write))
    }
}

async fn acquire(permits: &Semaphore) -> SemaphorePermit<'_> {
    permits.acquire().await.expect("the semaphore is never closed")
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn what_no_process_waits_for_goes_when_nothing_more_urgent_is_under_way() {
        let limiter = PriorityLimiter::default();
        let end = limiter.permit(WritePriority::TerminalStatus).await;
        let child = limiter.permit(WritePriority::Child).now_or_never();
        let child = child.expect("a terminal status that is being written does not delay a child");
        assert!(limiter.try_permit(WritePriority::Status).is_none(), "an end and a child are under way");
        let mut status = Box::pin(limiter.permit(WritePriority::Status));
        assert!(status.as_mut().now_or_never().is_none(), "an end and a child are under way");
        let mut event = Box::pin(limiter.permit(WritePriority::Event));
        assert!(event.as_mut().now_or_never().is_none(), "the same");
        drop(end);
        assert!(status.as_mut().now_or_never().is_none(), "a child is under way");
        drop(child);
        let first = status.now_or_never().expect("nothing is under way");
        let second = limiter.try_permit(WritePriority::Status).expect("others of its kind do not delay it");
        assert!(event.as_mut().now_or_never().is_none(), "two statuses are under way");
        drop((first, second));
        event.await;
    }

    #[tokio::test]
    async fn events_wait_until_no_more_jobs_end() {
        let limiter = PriorityLimiter { quiet_period: Duration::from_hours(1), ..PriorityLimiter::default() };
        drop(limiter.permit(WritePriority::TerminalStatus).await);
        assert!(limiter.permit(WritePriority::Status).now_or_never().is_some(), "others do not wait");
        assert!(limiter.try_permit(WritePriority::Event).is_none(), "another may end");
        assert!(limiter.permit(WritePriority::Event).now_or_never().is_none(), "the same");

        let limiter = PriorityLimiter { quiet_period: Duration::from_millis(20), ..PriorityLimiter::default() };
        let begin = Instant::now();
        drop(limiter.permit(WritePriority::TerminalStatus).await);
        drop(limiter.permit(WritePriority::Event).await);
        let waited = begin.elapsed();
        assert!(waited >= limiter.quiet_period && waited < limiter.timeout, "{waited:?}");
    }

    #[tokio::test]
    async fn what_is_less_urgent_waits_for_those_that_wait() {
        let limiter = PriorityLimiter::default();
        let mut under_way = Vec::new();
        for _ in 0..16 {
            under_way.push(limiter.permit(WritePriority::TerminalStatus).await);
        }
        let mut next = Box::pin(limiter.permit(WritePriority::TerminalStatus));
        assert!(next.as_mut().now_or_never().is_none(), "16 are under way");
        let mut child = Box::pin(limiter.permit(WritePriority::Child));
        assert!(child.as_mut().now_or_never().is_none(), "an end waits");
        under_way.pop();
        let _next = next.now_or_never().expect("one of them is written");
        assert!(child.now_or_never().is_some(), "no end waits any more");
        let mut next = Box::pin(limiter.permit(WritePriority::TerminalStatus));
        assert!(next.as_mut().now_or_never().is_none());
        drop(next);
        assert!(limiter.permit(WritePriority::Child).now_or_never().is_some(), "a write that gave up delays no other");
    }

    #[tokio::test]
    async fn no_write_waits_for_ever() {
        let timeout = Duration::from_millis(20);
        let limiter = PriorityLimiter { timeout, ..PriorityLimiter::default() };
        let child = limiter.permit(WritePriority::Child).await;
        let overdue = limiter.permit(WritePriority::Status).await;
        let second = tokio::time::timeout(timeout * 3, limiter.permit(WritePriority::Status)).await;
        assert!(second.is_err(), "one overdue write at a time");
        drop(overdue);
        drop(limiter.permit(WritePriority::Status).await);
        drop(child);
        assert!(limiter.permit(WritePriority::Status).now_or_never().is_some(), "the child is written");
    }
}
