//! Returns free memory to the system. The requests and answers of a burst of jobs need several times the memory of the
//! caches, and the C library keeps it; without this, the operator would stay as large as it was at the peak.

use std::time::Duration;

use psjobs_api::free_memory::return_free_memory;
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
        return_free_memory();
    }
}
