//! Measures how long each block's task has worked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The busy times of all blocks.
#[derive(Debug, Default)]
pub struct BlockBusyTimes(Mutex<BTreeMap<u32, BusyTime>>);

/// The busy time of one block, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct BusyTime(Arc<AtomicU64>);

impl BusyTime {
    /// Does `work` and adds its duration.
    pub fn measure<R>(&self, work: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let done = work();
        self.0.fetch_add(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
        done
    }
}

impl BlockBusyTimes {
    /// Returns the busy time of a block.
    pub fn of_block(&self, block: u32) -> BusyTime {
        self.lock().entry(block).or_default().clone()
    }

    /// Returns the `most` blocks that have worked longest, the busiest first.
    pub fn busiest(&self, most: usize) -> Vec<(u32, Duration)> {
        let mut blocks: Vec<(u32, u64)> =
            self.lock().iter().map(|(block, BusyTime(worked))| (*block, worked.load(Relaxed))).collect();
        blocks.sort_unstable_by_key(|(block, worked)| (std::cmp::Reverse(*worked), *block));
        blocks.into_iter().take(most).map(|(block, worked)| (block, Duration::from_nanos(worked))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, BusyTime>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_that_worked_longest_come_first() {
        let times = BlockBusyTimes::default();
        for (block, nanoseconds) in [(0, 10), (1, 30), (2, 30), (3, 20)] {
            times.of_block(block).0.fetch_add(nanoseconds, Relaxed);
        }
        let busiest: Vec<u32> = times.busiest(3).into_iter().map(|(block, _)| block).collect();
        assert_eq!(busiest, [1, 2, 3]);
    }
}
