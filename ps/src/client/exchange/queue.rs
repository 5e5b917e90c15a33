//! The order in which the blocks of one server leave.

use std::collections::BTreeSet;

/// The blocks of a step that one server has not answered yet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    to_send: BTreeSet<u32>,
    in_flight: BTreeSet<u32>,
}

impl Queue {
    /// All of them are to be sent.
    pub fn begin(&mut self, blocks: impl Iterator<Item = u32>) {
        self.to_send = blocks.collect();
        self.in_flight.clear();
    }

    /// The next block that leaves, back layers first, if fewer than `window` are on their way. Blocks before `first` stay.
    pub fn next(&mut self, window: usize, first: u32) -> Option<u32> {
        if self.in_flight.len() >= window {
            return None;
        }
        let block = self.to_send.last().copied().filter(|block| *block >= first)?;
        self.to_send.remove(&block);
        self.in_flight.insert(block);
        Some(block)
    }

    /// The server has answered a block.
    pub fn answered(&mut self, block: u32) {
        self.in_flight.remove(&block);
    }

    /// Queues the blocks again that were sent and `lost`.
    pub fn lost(&mut self, lost: impl Fn(u32) -> bool) {
        self.to_send.extend(self.in_flight.extract_if(.., |block| lost(*block)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_broken_connection_took_along_leaves_again_in_its_turn() {
        let mut queue = Queue::default();
        queue.begin(0..6);
        let sent = |queue: &mut Queue| std::iter::from_fn(|| queue.next(4, 0)).collect::<Vec<_>>();
        assert_eq!(sent(&mut queue), [5, 4, 3, 2]);
        assert!(sent(&mut queue).is_empty(), "the window is full");
        queue.answered(4);
        assert_eq!(sent(&mut queue), [1]);
        queue.lost(|block| block % 2 == 1);
        assert_eq!(sent(&mut queue), [5, 3, 1], "2 came over the other one and is still on its way");
        [5, 3, 2, 1].into_iter().for_each(|block| queue.answered(block));
        assert_eq!(sent(&mut queue), [0]);
        queue.answered(0);
        queue.lost(|_| true);
        assert!(sent(&mut queue).is_empty(), "nothing is sent again that was answered");
    }

    #[test]
    fn a_block_waits_for_its_gradient() {
        let mut queue = Queue::default();
        queue.begin(0..4);
        let sent = |queue: &mut Queue, first| std::iter::from_fn(|| queue.next(9, first)).collect::<Vec<_>>();
        assert_eq!(sent(&mut queue, 4), [0; 0]);
        assert_eq!(sent(&mut queue, 2), [3, 2]);
        queue.lost(|block| block == 3);
        assert_eq!(sent(&mut queue, 2), [3]);
        assert_eq!(sent(&mut queue, 0), [1, 0]);
    }
}
