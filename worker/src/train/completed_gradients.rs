//! Decides which gradients of a step leave while the others are still computed. Pure.

/// The gradients of a step that are complete, of parameters that lie one behind the other.
#[derive(Debug)]
pub struct CompletedGradients {
    /// The element with which each parameter begins.
    starts: Vec<usize>,
    block_elements: usize,
    is_complete: Vec<bool>,
    /// All parameters from this one on are complete.
    first: usize,
    /// Blocks before those that were offered.
    blocks_left: usize,
    /// All blocks; 0 if none leaves early.
    blocks: usize,
}

impl CompletedGradients {
    /// Takes the `lengths` of the parameters, and the elements of a block: gradients leave in whole blocks.
    pub fn new(lengths: impl Iterator<Item = usize>, block_elements: usize) -> Self {
        let mut elements = 0;
        let start = |length| {
            elements += length;
            elements - length
        };
        let starts: Vec<usize> = lengths.map(start).collect();
        let blocks = elements.div_ceil(block_elements);
        Self {
            is_complete: vec![false; starts.len()],
            first: starts.len(),
            blocks_left: blocks,
            starts,
            block_elements,
            blocks,
        }
    }

    /// Lets nothing leave early.
    pub fn offer_nothing(&mut self) {
        self.blocks = 0;
    }

    /// Begins a step: no gradient is complete.
    pub fn begin(&mut self) {
        self.is_complete.fill(false);
        (self.first, self.blocks_left) = (self.starts.len(), self.blocks);
    }

    /// Records that the gradient of parameter `index` is complete. Returns the element from which on gradients may leave, if
    /// that lets a block go. None is returned for the last ones, with which the step is complete.
    pub fn add(&mut self, index: usize) -> Option<usize> {
        self.is_complete[index] = true;
        while self.first > 0 && self.is_complete[self.first - 1] {
            self.first -= 1;
        }
        let first = *self.starts.get(self.first)?;
        let blocks_left = first.div_ceil(self.block_elements);
        if first == 0 || blocks_left >= self.blocks_left {
            return None;
        }
        self.blocks_left = blocks_left;
        Some(first)
    }

    /// Returns the parameters without a gradient.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.is_complete.iter().enumerate().filter(|(_, is_complete)| !**is_complete).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_from_the_last_when_all_behind_them_are_complete() {
        // Blocks of 4: 0..4, 4..8, 8..10. Parameters: 0..3, 3..4, 4..9, 9..10.
        let lengths = [3, 1, 5, 1];
        for (order, offers) in [
            // The last block is complete with parameter 2, and the one before it as well.
            ([3, 2, 1, 0], [None, Some(4), None, None]),
            ([2, 3, 0, 1], [None, Some(4), None, None]),
            ([0, 1, 2, 3], [None, None, None, None]),
        ] {
            let mut gradients = CompletedGradients::new(lengths.into_iter(), 4);
            for step in 0..2 {
                gradients.begin();
                assert_eq!(order.map(|index| gradients.add(index)), offers, "order {order:?}, step {step}");
                assert_eq!(gradients.missing().count(), 0);
            }
        }
    }

    #[test]
    fn each_offer_lets_another_block_go() {
        let mut gradients = CompletedGradients::new([2; 6].into_iter(), 4);
        let offers: Vec<Option<usize>> = (0..6).rev().map(|index| gradients.add(index)).collect();
        assert_eq!(offers, [None, Some(8), None, Some(4), None, None]);
        gradients.offer_nothing();
        gradients.begin();
        assert!((0..6).rev().all(|index| gradients.add(index).is_none()));
    }

    #[test]
    fn a_gradient_that_does_not_come_holds_back_those_before_it() {
        let mut gradients = CompletedGradients::new([4; 4].into_iter(), 4);
        assert_eq!([3, 1, 0].map(|index| gradients.add(index)), [Some(12), None, None]);
        assert_eq!(gradients.missing().collect::<Vec<_>>(), [2]);
    }
}
