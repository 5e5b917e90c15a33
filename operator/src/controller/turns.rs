//! How many requests are under way at once, over all jobs: enough to hide the latency, few enough to leave
//! the API server to others (it takes 200 writes at once by default). Each is a connection.
//!
//! When many jobs begin or end together, pods come first, then statuses, then events: a status costs the
//! API server as much as several pods, and nobody waits for an event.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// How long a status waits for other jobs' pods, at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Turns by what is written.
pub struct Turns {
    children: Semaphore,
    statuses: Semaphore,
    /// Children that wait for their turn.
    waiting: AtomicUsize,
    calm: Notify,
    /// How long a status waits for children.
    patience: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        let (children, statuses) = (Semaphore::new(64), Semaphore::new(8));
        Self { children, statuses, waiting: AtomicUsize::new(0), calm: Notify::new(), patience: PATIENCE }
    }
}

/// One that waits; also one that gives up waiting is counted out.
struct Waiting<'a>(&'a Turns);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.calm.notify_waiters();
        }
    }
}

impl Turns {
    /// Waits for the turn to create or delete a child. Cancel-safe.
    pub async fn child(&self) -> SemaphorePermit<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(self);
        self.children.acquire().await.expect("nobody closes it")
    }

    /// Waits for the turn to write a status. Cancel-safe.
    pub async fn status(&self) -> SemaphorePermit<'_> {
        self.calm().await;
        self.statuses.acquire().await.expect("nobody closes it")
    }

    /// Waits until no child waits for its turn, but not for ever.
    pub async fn calm(&self) {
        let calm = async {
            loop {
                // Before the look, so that a ring in between is not missed.
                let rung = self.calm.notified();
                if self.waiting.load(Ordering::Acquire) == 0 {
                    return;
                }
                rung.await;
            }
        };
        // More children than the API server takes in that time: the statuses of others cannot wait for all.
        let _ = tokio::time::timeout(self.patience, calm).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_status_waits_for_children_that_wait_but_not_for_ever() {
        let turns = Turns { patience: Duration::from_millis(20), ..Turns::default() };
        let mut under_way = Vec::new();
        for _ in 0..64 {
            under_way.push(turns.child().await);
        }
        assert!(turns.status().now_or_never().is_some(), "children that are being written are not in the way");
        let mut next = Box::pin(turns.child());
        assert!(next.as_mut().now_or_never().is_none(), "64 are under way");
        let mut status = Box::pin(turns.status());
        assert!(status.as_mut().now_or_never().is_none(), "a child waits");
        under_way.pop();
        let _child = next.await;
        drop(status.await);

        let mut next = Box::pin(turns.child());
        assert!(next.as_mut().now_or_never().is_none());
        drop(turns.status().await);
        assert!(next.as_mut().now_or_never().is_none(), "it is still there; the status has waited long enough");
        drop(next);
        assert!(turns.status().now_or_never().is_some(), "one that gave up waiting is in nobody's way");
    }
}
