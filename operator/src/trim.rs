//! Gives memory back. A burst of jobs takes several times what their caches keep, for requests and answers, and the C
//! library holds on to it; after the burst the operator would look as large as it ever was.

use std::time::Duration;

use tokio::time::MissedTickBehavior;

/// Often enough that a burst's memory is soon somebody else's, and rarely enough to cost nothing: one takes
/// milliseconds.
const INTERVAL: Duration = Duration::from_secs(5);

/// Gives free memory back to the system from time to time, for ever.
pub async fn run() {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        trim();
    }
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library offers no other way")]
fn trim() {
    // SAFETY: it takes the allocator's own locks, touches free memory alone, and may be called from any thread.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}
