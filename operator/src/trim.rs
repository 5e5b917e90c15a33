//! Returns free memory to the system. The requests and answers of a burst of jobs need several times the memory of the
//! caches, and the C library keeps it; without this, the operator would stay as large as it was at the peak.

use std::time::Duration;

use tokio::time::MissedTickBehavior;

/// How often memory is returned: often enough that the memory of a burst is soon available to others, and rarely enough
/// to cost little, as each call takes milliseconds.
const INTERVAL: Duration = Duration::from_secs(5);

/// Returns free memory to the system periodically; never ends.
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
