//! How many requests are under way at once, over all jobs: enough to hide the latency, few enough to leave
//! the API server to others (it takes 200 writes at once by default). Each is a connection.
//!
//! When many jobs begin or end together, pods come first, then statuses, then events: a status costs the
//! API server as much as several pods, and nobody waits for an event.

use tokio::sync::Semaphore;

/// Turns by what is written.
pub struct Turns {
    pub children: Semaphore,
    pub statuses: Semaphore,
    pub events: Semaphore,
}

impl Default for Turns {
    fn default() -> Self {
        Self { children: Semaphore::new(64), statuses: Semaphore::new(8), events: Semaphore::new(4) }
    }
}
