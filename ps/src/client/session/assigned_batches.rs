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
    /// One more than the highest batch of this process.
    pub seen: u64,
    /// Batches that the loop has not asked for yet.
    pub queue: VecDeque<u64>,
}

impl AssignedBatches {
    /// Begins a new entry: what it holds is assigned to others.
    pub fn begin(&mut self) {
        *self = Self { entry: self.entry + 1, seen: self.seen, ..Self::default() };
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
