//! Where a server's time goes: how long each block's task has worked.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Work of all blocks.
#[derive(Debug, Default)]
pub struct Heat(Mutex<BTreeMap<u32, Meter>>);

/// One block's nanoseconds of work.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    /// Does `work`, and counts how long it takes.
    pub fn time<R>(&self, work: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let done = work();
        self.0.fetch_add(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
        done
    }
}

impl Heat {
    /// The meter of a block.
    pub fn meter(&self, block: u32) -> Meter {
        self.lock().entry(block).or_default().clone()
    }

    /// The `most` blocks that have worked longest, hottest first.
    pub fn hottest(&self, most: usize) -> Vec<(u32, Duration)> {
        let mut blocks: Vec<(u32, u64)> =
            self.lock().iter().map(|(block, Meter(worked))| (*block, worked.load(Relaxed))).collect();
        blocks.sort_unstable_by_key(|(block, worked)| (std::cmp::Reverse(*worked), *block));
        blocks.into_iter().take(most).map(|(block, worked)| (block, Duration::from_nanos(worked))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Meter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_that_worked_longest_come_first() {
        let heat = Heat::default();
        for (block, nanoseconds) in [(0, 10), (1, 30), (2, 30), (3, 20)] {
            heat.meter(block).0.fetch_add(nanoseconds, Relaxed);
        }
        let hottest: Vec<u32> = heat.hottest(3).into_iter().map(|(block, _)| block).collect();
        assert_eq!(hottest, [1, 2, 3]);
    }
}
