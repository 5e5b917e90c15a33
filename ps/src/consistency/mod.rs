//! When a gradient takes effect, for one block: pure decisions, no data and no clock. The block's
//! task does what they say.
//!
//! A gradient is known by (trainer, step). Of each trainer a block takes steps in ascending order
//! and each one once; a repeat, after a broken connection, is answered and not applied. In Sync one
//! round takes one gradient of every trainer that has not finished, or of all but the backups. In
//! Bounded every gradient is applied on arrival, and its trainer answered when it is at most
//! `staleness` steps ahead of the slowest (Ho et al., NIPS 2013).

use std::collections::{BTreeMap, BTreeSet};

use psjobs_api::training::{Consistency, ConsistencyMode};

/// What to do with a gradient that has come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Apply it now; answer as soon as [`Rule::may_go_on`].
    Apply,
    /// It waits for others; add it to the round's sum when its turn comes, answer when the round closes.
    Hold,
    /// It was applied before: answer with the current values, as soon as [`Rule::may_go_on`].
    Answer,
    /// It is part of the open round already: answer when the round closes.
    Join,
    /// Its round closed without it: leave it out and answer.
    Drop,
}

/// The consistency rule of one block and what it remembers.
#[derive(Clone, Debug)]
pub struct Rule {
    consistency: Consistency,
    /// The next step that is expected of each trainer that ever gave one.
    next: BTreeMap<u32, u64>,
    /// Trainers that have not finished.
    members: BTreeSet<u32>,
    /// Trainers that gave to the open round.
    given: BTreeSet<u32>,
}

impl Rule {
    /// A rule for trainers 0..`trainers`, of which none has finished.
    #[must_use]
    pub fn new(consistency: Consistency, trainers: u32) -> Self {
        Self { consistency, next: BTreeMap::new(), members: (0..trainers).collect(), given: BTreeSet::new() }
    }

    /// Takes the gradient of `trainer` for `step`; `stale` says that it was computed from values older
    /// than the block's, which matters where rounds close without everybody.
    pub fn offer(&mut self, trainer: u32, step: u64, stale: bool) -> Verdict {
        let repeat = self.next.get(&trainer).is_some_and(|next| step < *next);
        if repeat {
            return if self.given.contains(&trainer) { Verdict::Join } else { Verdict::Answer };
        }
        self.next.insert(trainer, step.saturating_add(1));
        match self.consistency.mode {
            ConsistencyMode::Async | ConsistencyMode::Bounded => Verdict::Apply,
            ConsistencyMode::Sync if stale && self.has_backups() => Verdict::Drop,
            ConsistencyMode::Sync => {
                self.given.insert(trainer);
                Verdict::Hold
            }
        }
    }

    /// Whether the trainer's gradient may be added to the sum: all members before it have given,
    /// so that the order of addition is that of the trainers, whoever came first. With backups nobody
    /// knows who will have given, so that all wait for the end of the round.
    #[must_use]
    pub fn in_turn(&self, trainer: u32) -> bool {
        !self.has_backups() && self.members.range(..trainer).all(|before| self.given.contains(before))
    }

    /// Closes the open round if enough members gave: its contributors, ascending.
    pub fn close_round(&mut self) -> Option<BTreeSet<u32>> {
        let waited_for = self.members.difference(&self.given).count();
        let complete = !self.given.is_empty() && waited_for <= self.consistency.backup_trainers as usize;
        complete.then(|| std::mem::take(&mut self.given))
    }

    /// Whether a trainer that has given `step` may get values for what follows: unless Bounded and too far ahead.
    /// A repeat is judged by its own step: the trainer is there again, whatever this block has of it.
    #[must_use]
    pub fn may_go_on(&self, step: u64) -> bool {
        self.consistency.mode != ConsistencyMode::Bounded || self.lead(step) <= self.consistency.staleness.into()
    }

    /// Steps that a trainer is ahead of the slowest member when it has given `step`.
    #[must_use]
    pub fn lead(&self, step: u64) -> u64 {
        let slowest = self.members.iter().map(|member| self.next_step(*member)).min();
        slowest.map_or(0, |slowest| step.saturating_add(1).saturating_sub(slowest))
    }

    /// The trainer has finished: nobody waits for it any more. What it gave still counts.
    pub fn finish(&mut self, trainer: u32) {
        self.members.remove(&trainer);
    }

    /// On a backup: the primary has everything of `trainer` before `step`.
    pub fn advance(&mut self, trainer: u32, step: u64) {
        let next = self.next.entry(trainer).or_insert(0);
        *next = step.max(*next);
    }

    /// The first step that this block does not have from `trainer`.
    #[must_use]
    pub fn next_step(&self, trainer: u32) -> u64 {
        self.next.get(&trainer).copied().unwrap_or(0)
    }

    /// The first step of `trainer` whose gradient the block's values do not contain: what it gave to
    /// the open round is not in them yet.
    #[must_use]
    pub fn settled(&self, trainer: u32) -> u64 {
        self.next_step(trainer) - u64::from(self.given.contains(&trainer))
    }

    /// Goes back, or on, to where each trainer's next step is the one in `steps`; the open round is
    /// forgotten.
    pub fn restore(&mut self, steps: &[u64]) {
        self.given.clear();
        self.next = (0..).zip(steps.iter().copied()).collect();
    }

    fn has_backups(&self) -> bool {
        self.consistency.backup_trainers > 0
    }
}

#[cfg(test)]
mod tests;
