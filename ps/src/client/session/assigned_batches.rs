//! The batches of a trainer of an elastic job, between their assignment and their end.

use std::collections::VecDeque;

/// The batches that server 0 has assigned to this trainer of an elastic job.
#[derive(Debug, Default)]
pub struct AssignedBatches {
    /// Counts the times that it took its place.
    pub entry: u64,
    /// Batches since then, and of those that were done.
    pub dealt: u64,
    pub done: u64,
    /// One more than the highest batch of this process in the servers' epoch.
    pub seen: u64,
    epoch: u64,
    /// Batches that the loop has not asked for yet.
    pub queue: VecDeque<u64>,
}

impl AssignedBatches {
    /// Begins a new entry in `epoch`: what it holds is assigned to others. Servers that have gone back to a checkpoint since
    /// assign batches again.
    pub fn begin(&mut self, epoch: u64) {
        let seen = if epoch == self.epoch { self.seen } else { 0 };
        *self = Self { entry: self.entry + 1, seen, epoch, ..Self::default() };
    }

    /// Returns the entry and the batches done since, as heartbeats report them.
    pub fn reported(&self) -> (u64, u64) {
        (self.entry, self.done)
    }

    /// Counts a batch as done.
    pub fn did_one(&mut self) {
        self.done += 1;
    }

    /// Adds assigned batches.
    pub fn take(&mut self, first: u64, count: u64) {
        let end = first.saturating_add(count);
        self.dealt += count;
        self.seen = self.seen.max(end);
        self.queue.extend(first..end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_batch_is_known_until_servers_go_back() {
        let mut batches = AssignedBatches::default();
        batches.begin(1);
        batches.take(16, 8);
        batches.did_one();
        assert_eq!((batches.dealt, batches.seen, batches.reported()), (8, 24, (1, 1)));
        batches.begin(1);
        assert_eq!((batches.dealt, batches.seen, batches.reported()), (0, 24, (2, 0)), "it has entered again");
        batches.begin(2);
        assert_eq!((batches.seen, batches.reported()), (0, (3, 0)), "the servers have gone back");
    }
}
