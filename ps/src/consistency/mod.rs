//! When a gradient takes effect, for one block: pure decisions, no data and no clock. The block's
//! task does what they say.
//!
//! A gradient is known by (trainer, step). Of each trainer a block takes steps in ascending order
//! and each one once; a repeat, after a broken connection, is answered and not applied. In Sync one
//! round takes one gradient of every trainer that has not finished.

use std::collections::{BTreeMap, BTreeSet};

use psjobs_api::training::ConsistencyMode;

/// What to do with a gradient that has come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Apply it now and answer.
    Apply,
    /// It waits for others; add it to the round's sum when its turn comes, answer when the round closes.
    Hold,
    /// It was applied before: answer with the current values.
    Answer,
    /// It is part of the open round already: answer when the round closes.
    Join,
}

/// The consistency rule of one block and what it remembers.
#[derive(Clone, Debug)]
pub struct Rule {
    mode: ConsistencyMode,
    /// The next step that is expected of each trainer that ever gave one.
    next: BTreeMap<u32, u64>,
    /// Trainers whose gradients a round waits for.
    members: BTreeSet<u32>,
    /// Trainers that gave to the open round.
    given: BTreeSet<u32>,
}

impl Rule {
    /// A rule for trainers 0..`trainers`, of which none has finished.
    #[must_use]
    pub fn new(mode: ConsistencyMode, trainers: u32) -> Self {
        Self { mode, next: BTreeMap::new(), members: (0..trainers).collect(), given: BTreeSet::new() }
    }

    /// Takes the gradient of `trainer` for `step`.
    pub fn offer(&mut self, trainer: u32, step: u64) -> Verdict {
        let repeat = self.next.get(&trainer).is_some_and(|next| step < *next);
        if repeat {
            return if self.given.contains(&trainer) { Verdict::Join } else { Verdict::Answer };
        }
        self.next.insert(trainer, step + 1);
        match self.mode {
            ConsistencyMode::Async => Verdict::Apply,
            ConsistencyMode::Sync => {
                self.given.insert(trainer);
                Verdict::Hold
            }
        }
    }

    /// Whether the trainer's gradient may be added to the sum: all members before it have given,
    /// so that the order of addition is that of the trainers, whoever came first.
    #[must_use]
    pub fn in_turn(&self, trainer: u32) -> bool {
        self.members.range(..trainer).all(|before| self.given.contains(before))
    }

    /// Closes the open round if every member gave: its contributors, ascending.
    pub fn close_round(&mut self) -> Option<BTreeSet<u32>> {
        let complete = !self.given.is_empty() && self.members.is_subset(&self.given);
        complete.then(|| std::mem::take(&mut self.given))
    }

    /// The trainer has finished: no round waits for it any more. What it gave still counts.
    pub fn finish(&mut self, trainer: u32) {
        self.members.remove(&trainer);
    }

    /// The first step that this block does not have from `trainer`.
    #[must_use]
    pub fn next_step(&self, trainer: u32) -> u64 {
        self.next.get(&trainer).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_asynchronous_gradient_is_applied_once() {
        let mut rule = Rule::new(ConsistencyMode::Async, 2);
        for (trainer, step, want) in [
            (0, 0, Verdict::Apply),
            (0, 0, Verdict::Answer),
            (1, 0, Verdict::Apply),
            (0, 1, Verdict::Apply),
            (0, 0, Verdict::Answer),
            (1, 7, Verdict::Apply),
            (1, 6, Verdict::Answer),
        ] {
            assert_eq!(rule.offer(trainer, step), want, "trainer {trainer}, step {step}");
        }
        assert_eq!((rule.next_step(0), rule.next_step(1), rule.next_step(2)), (2, 8, 0));
    }

    #[test]
    fn a_round_closes_when_all_members_gave() {
        let mut rule = Rule::new(ConsistencyMode::Sync, 3);
        assert_eq!(rule.offer(2, 0), Verdict::Hold);
        assert!(!rule.in_turn(2), "0 and 1 come first");
        assert_eq!(rule.offer(0, 0), Verdict::Hold);
        assert!(rule.in_turn(0));
        assert_eq!(rule.offer(0, 0), Verdict::Join, "a resent gradient waits with the first");
        assert_eq!(rule.close_round(), None);
        assert_eq!(rule.offer(1, 0), Verdict::Hold);
        assert!(rule.in_turn(1) && rule.in_turn(2));
        assert_eq!(rule.close_round(), Some([0, 1, 2].into()));
        assert_eq!(rule.offer(1, 0), Verdict::Answer);
    }

    #[test]
    fn a_finished_trainer_is_not_waited_for() {
        let mut rule = Rule::new(ConsistencyMode::Sync, 2);
        assert_eq!(rule.offer(0, 4), Verdict::Hold);
        assert_eq!(rule.close_round(), None);
        rule.finish(1);
        assert_eq!(rule.close_round(), Some([0].into()));
        assert_eq!(rule.close_round(), None, "an empty round does not close");
    }

    proptest! {
        /// Whatever arrives in whatever order, with repeats: each (trainer, step) is applied once.
        #[test]
        fn nothing_is_applied_twice(sync: bool, offers in prop::collection::vec((0_u32..4, 0_u64..6), 0..200)) {
            let mode = if sync { ConsistencyMode::Sync } else { ConsistencyMode::Async };
            let mut rule = Rule::new(mode, 4);
            let mut taken = BTreeSet::new();
            for (trainer, step) in offers {
                let before = rule.next_step(trainer);
                match rule.offer(trainer, step) {
                    Verdict::Apply | Verdict::Hold => prop_assert!(taken.insert((trainer, step))),
                    Verdict::Answer | Verdict::Join => prop_assert!(step < before),
                }
                prop_assert!(rule.next_step(trainer) >= before);
                if let Some(round) = rule.close_round() {
                    prop_assert_eq!(round.len(), 4);
                }
            }
        }
    }
}
