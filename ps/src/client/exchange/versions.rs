//! The versions of parameters, by which servers count how stale a gradient is: of those that a trainer holds, and of those
//! that its gradient was computed with. Pure.

/// The updates that each block of a trainer's parameters contains.
#[derive(Debug)]
pub(super) struct Versions {
    /// In the parameters that the trainer holds.
    held: Vec<u64>,
    /// The trainer computes a gradient while the exchange of the one before is under way.
    overlaps: bool,
    /// In the parameters that the trainer computes its next gradient with, where those are not the ones that it holds.
    taken: Option<Vec<u64>>,
    /// In the parameters that the gradient was computed with which is exchanged, where exchanges overlap.
    computed_with: Option<Vec<u64>>,
}

impl Versions {
    /// Creates the versions of parameters without updates.
    pub fn new(blocks: usize, overlaps: bool) -> Self {
        Self { held: vec![0; blocks], overlaps, taken: None, computed_with: None }
    }

    /// Records that the parameters held contain `version` updates of a block.
    pub fn holds(&mut self, block: u32, version: u64) {
        self.held[block as usize] = version;
    }

    /// Begins the exchange of a gradient. The trainer takes the parameters held, to compute the next one with them.
    pub fn begin(&mut self) {
        if self.overlaps {
            let held = self.held.clone();
            self.computed_with = Some(self.taken.replace(held.clone()).unwrap_or(held));
        }
    }

    /// The trainer takes the parameters held, and computes its next gradient with them.
    pub fn take(&mut self) {
        self.taken = None;
    }

    /// Returns the updates of a block in the parameters that the gradient was computed with.
    pub fn of_gradient(&self, block: u32) -> u64 {
        self.computed_with.as_ref().unwrap_or(&self.held)[block as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exchanges `steps` gradients with a server whose only updates they are. Returns the version that is sent with each.
    fn sent(versions: &mut Versions, from: u64, steps: u64) -> Vec<u64> {
        let exchange = |step| {
            versions.begin();
            let sent = versions.of_gradient(0);
            versions.holds(0, step + 1);
            assert!(versions.of_gradient(0) == sent || !versions.overlaps, "it is the same when it is sent again");
            sent
        };
        (from..from + steps).map(exchange).collect()
    }

    #[test]
    fn a_gradient_counts_by_the_parameters_that_it_was_computed_with() {
        assert_eq!(sent(&mut Versions::new(1, false), 0, 4), [0, 1, 2, 3], "one after the other");
        let mut versions = Versions::new(1, true);
        assert_eq!(sent(&mut versions, 0, 4), [0, 0, 1, 2], "each while the exchange of the one before is under way");
        // The trainer has waited for the last exchange, as at the end of an epoch.
        versions.take();
        assert_eq!(sent(&mut versions, 4, 3), [4, 4, 5]);
        // The servers went back, and the trainer with them.
        versions.holds(0, 2);
        versions.take();
        assert_eq!(sent(&mut versions, 2, 3), [2, 2, 3]);
    }
}
