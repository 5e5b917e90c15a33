//! Counters that the tasks of blocks increment.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};

use super::block_busy_time::BlockBusyTimes;
use crate::staleness::Histogram;

/// Counters of all blocks of a server.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    late: AtomicU64,
    not_finite: AtomicU64,
    staleness: Mutex<Histogram>,
    /// How long each block's task has worked.
    pub busy_times: BlockBusyTimes,
}

impl BlockMetrics {
    /// Counts a gradient that arrived after its round had closed without it.
    pub fn count_late(&self) {
        self.late.fetch_add(1, Relaxed);
    }

    /// Counts a gradient with NaN or infinity.
    pub fn count_not_finite(&self) {
        self.not_finite.fetch_add(1, Relaxed);
    }

    /// Counts an update by its staleness.
    pub fn record_staleness(&self, staleness: u64) {
        self.staleness().record(staleness);
    }

    /// Returns the number of late gradients.
    pub fn late(&self) -> u64 {
        self.late.load(Relaxed)
    }

    /// Returns the number of gradients with NaN or infinity.
    pub fn not_finite(&self) -> u64 {
        self.not_finite.load(Relaxed)
    }

    /// Locks the histogram of the updates' staleness.
    pub fn staleness(&self) -> MutexGuard<'_, Histogram> {
        self.staleness.lock()
    }
}
