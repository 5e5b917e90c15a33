//! When a gradient takes effect, for one block: pure decisions, no data and no clock. The block's
//! task does what they say.
//!
//! A gradient is known by (trainer, step). Of each trainer a block takes steps in ascending order
//! and each one once; a repeat, after a broken connection, is answered and not applied. In Sync one
//! round takes one gradient of every trainer that has not finished, or of all but the backups. In
//! Bounded every gradient is applied on arrival, and its trainer answered when it is at most
//! `staleness` steps ahead of the slowest (Ho et al., NIPS 2013).
//!
//! In an elastic job a round waits only for trainers that have joined and not left. In Sync its rounds are numbered: a
//! gradient of step s is for round s of every block, or for none. A newcomer says from which round on it takes part
//! ([`Rule::enter`]) before it computes anything, so that all blocks wait for it from the same round on: trainers that
//! took part in round 7 of one block and in round 8 of another would soon wait for each other in a circle.

use std::collections::{BTreeMap, BTreeSet};

use psjobs_api::training::{Consistency, ConsistencyMode};

/// The decision about a gradient.
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
    /// In an elastic job: its round closed without it, because its trainer was taken for gone. It has to enter again.
    Late,
}

/// The consistency rule of one block and what it remembers.
#[derive(Clone, Debug)]
pub struct Rule {
    consistency: Consistency,
    elastic: bool,
    /// The next step that is expected of each trainer that ever gave one.
    next: BTreeMap<u32, u64>,
    /// The next step that is expected of each other trainer.
    first: u64,
    /// Trainers that are waited for, and the first round that waits for them.
    members: BTreeMap<u32, u64>,
    /// Trainers that gave to the open round.
    given: BTreeSet<u32>,
    /// Number of the open round, in Sync of an elastic job; 0 elsewhere.
    round: u64,
    /// Members that the open round waits for; `None` when they have to be found anew. Kept, because each gradient of a round
    /// asks for them: found anew each time they would cost the square of the number of trainers.
    awaited: Option<BTreeSet<u32>>,
    /// In Bounded the lowest next step of a member and the number of members at it, kept for the same reason; `None` where
    /// there is no member, and in the other modes.
    slowest: Option<(u64, usize)>,
}

impl Rule {
    /// A rule for trainers 0..`trainers`, of which none has finished.
    #[must_use]
    pub fn new(consistency: Consistency, trainers: u32) -> Self {
        let mut rule = Self {
            consistency,
            elastic: false,
            next: BTreeMap::new(),
            first: 0,
            members: (0..trainers).map(|trainer| (trainer, 0)).collect(),
            given: BTreeSet::new(),
            round: 0,
            awaited: None,
            slowest: None,
        };
        rule.recount();
        rule
    }

    /// A rule for trainers of an elastic job, none of which is there yet.
    #[must_use]
    pub fn elastic(consistency: Consistency) -> Self {
        Self { elastic: true, ..Self::new(consistency, 0) }
    }

    /// A trainer of an elastic job takes part from `step` on. In Sync it is waited for from that round on, and is in
    /// its turn when that one is open ([`Rule::may_begin`]); elsewhere from its first gradient on.
    ///
    /// # Errors
    /// In Sync the first round that it can still give to, if that is a later one: the trainer is not waited for until
    /// it enters again.
    pub fn enter(&mut self, trainer: u32, step: u64) -> Result<(), u64> {
        // Where a process before this one was is not where this one is.
        self.members.remove(&trainer);
        if !self.counts_rounds() {
            self.recount();
            return Ok(());
        }
        // What a process before this one gave to the open round counts.
        let first = self.entry(trainer);
        if step >= first {
            self.members.insert(trainer, step);
        }
        self.skip_rounds();
        self.recount();
        if step < first { Err(first) } else { Ok(()) }
    }

    /// Returns whether a trainer that enters with `step` may get the values to compute its gradient from.
    #[must_use]
    pub fn may_begin(&self, step: u64) -> bool {
        !self.counts_rounds() || self.round >= step
    }

    /// The step with which a trainer begins that joins now. In an elastic job that is where the others are: in Sync the
    /// open round unless it gave to that before, elsewhere the first step that no trainer has given.
    #[must_use]
    pub fn entry(&self, trainer: u32) -> u64 {
        match (self.elastic, self.consistency.mode) {
            (false, _) => self.settled(trainer),
            (true, ConsistencyMode::Sync) => self.round.max(self.next_step(trainer)),
            (true, ConsistencyMode::Bounded | ConsistencyMode::Async) => self.next.values().copied().max().unwrap_or(0),
        }
    }

    /// Takes the gradient of `trainer` for `step`; `stale` says that it was computed from values older
    /// than the block's, which matters where rounds close without everybody.
    pub fn offer(&mut self, trainer: u32, step: u64, stale: bool) -> Verdict {
        let before = self.next_step(trainer);
        if step < before {
            return if self.given.contains(&trainer) { Verdict::Join } else { Verdict::Answer };
        }
        if self.counts_rounds() && step < self.round {
            return Verdict::Late;
        }
        self.next.insert(trainer, step.saturating_add(1));
        if self.members.contains_key(&trainer) {
            self.no_longer_at(before);
        }
        match self.consistency.mode {
            ConsistencyMode::Async | ConsistencyMode::Bounded => {
                self.welcome(trainer, step);
                Verdict::Apply
            }
            ConsistencyMode::Sync if stale && self.has_backups() => Verdict::Drop,
            ConsistencyMode::Sync => {
                self.welcome(trainer, step);
                self.given.insert(trainer);
                if let Some(awaited) = &mut self.awaited {
                    awaited.remove(&trainer);
                }
                Verdict::Hold
            }
        }
    }

    /// Returns whether the trainer's gradient may be added to the sum: all members before it have given,
    /// so that the order of addition is that of the trainers, in whatever order they gave. With backup trainers
    /// the contributors are known only when the round ends, so that all gradients wait for that.
    #[must_use]
    pub fn in_turn(&mut self, trainer: u32) -> bool {
        !self.has_backups() && self.awaited().first().is_none_or(|first| *first >= trainer)
    }

    /// Closes the open round if enough members gave: its contributors, ascending.
    pub fn close_round(&mut self) -> Option<BTreeSet<u32>> {
        if self.given.is_empty() || self.awaited().len() > self.consistency.backup_trainers as usize {
            return None;
        }
        let given = std::mem::take(&mut self.given);
        if !self.elastic && !self.has_backups() {
            // All have given one step, unless this block was started anew and has forgotten theirs. One that is behind is then
            // answered at once until it has caught up: the others do not come back to its steps.
            let furthest = given.iter().map(|trainer| self.next_step(*trainer)).max().unwrap_or(0);
            self.next.extend(given.iter().map(|trainer| (*trainer, furthest)));
        }
        if self.counts_rounds() {
            self.round = given.iter().map(|trainer| self.next_step(*trainer)).max().unwrap_or(0).max(self.round);
            self.skip_rounds();
        }
        self.recount();
        Some(given)
    }

    /// Returns whether a trainer that has given `step` may get values for what follows: unless Bounded and too far
    /// ahead. A repeat is judged by its own step: the trainer is there again, whatever this block has of it.
    #[must_use]
    pub fn may_go_on(&self, step: u64) -> bool {
        self.consistency.mode != ConsistencyMode::Bounded || self.lead(step) <= self.consistency.staleness.into()
    }

    /// Steps that a trainer is ahead of the slowest member when it has given `step`, in Bounded; 0 elsewhere.
    #[must_use]
    pub fn lead(&self, step: u64) -> u64 {
        self.slowest.map_or(0, |(slowest, _)| step.saturating_add(1).saturating_sub(slowest))
    }

    /// The trainer has finished, or has left an elastic job: no round waits for it any more. What it gave still counts.
    pub fn finish(&mut self, trainer: u32) {
        if self.members.remove(&trainer).is_some() {
            self.no_longer_at(self.next_step(trainer));
        }
        if let Some(awaited) = &mut self.awaited {
            awaited.remove(&trainer);
        }
        self.skip_rounds();
    }

    /// On a backup: the primary has everything of `trainer` before `step`.
    pub fn advance(&mut self, trainer: u32, step: u64) {
        let before = self.next_step(trainer);
        self.next.insert(trainer, step.max(before));
        if step > before && self.members.contains_key(&trainer) {
            self.no_longer_at(before);
        }
        self.welcome(trainer, step);
        if self.counts_rounds() {
            self.round = self.round.max(step);
            self.awaited = None;
        }
    }

    /// The first step that this block does not have from `trainer`.
    #[must_use]
    pub fn next_step(&self, trainer: u32) -> u64 {
        self.next.get(&trainer).copied().unwrap_or(self.first)
    }

    /// The first step of `trainer` whose gradient the block's values do not contain: what it gave to
    /// the open round is not in them yet.
    #[must_use]
    pub fn settled(&self, trainer: u32) -> u64 {
        self.next_step(trainer) - u64::from(self.given.contains(&trainer))
    }

    /// Steps that the block's values contain of every member: those who have finished hold nothing back. Without members the
    /// steps of the furthest trainer, so that it never goes back.
    #[must_use]
    pub fn settled_by_members(&self) -> u64 {
        let least = self.members.keys().map(|member| self.settled(*member)).min();
        least.or_else(|| self.next.keys().map(|trainer| self.settled(*trainer)).max()).unwrap_or(0)
    }

    /// Goes back, or on, to where each trainer's next step is the one in `steps`; the open round is
    /// forgotten, and in an elastic job who takes part. In another job trainers that are not in `steps`, because it had
    /// fewer when they were recorded, begin with the step of the slowest: rounds go on with all of them.
    pub fn restore(&mut self, steps: &[u64]) {
        self.given.clear();
        self.next = (0..).zip(steps.iter().copied()).collect();
        self.first = steps.iter().copied().min().filter(|_| !self.elastic).unwrap_or(0);
        if self.elastic {
            self.members.clear();
        }
        if self.counts_rounds() {
            self.round = steps.iter().copied().max().unwrap_or(0);
        }
        self.recount();
    }

    /// In an elastic job a trainer is there that gives its gradient of `step`.
    fn welcome(&mut self, trainer: u32, step: u64) {
        if !self.elastic {
            return;
        }
        let before = self.members.len();
        self.members.entry(trainer).or_insert(step);
        if self.members.len() > before {
            self.recount();
        }
    }

    /// Members that the open round waits for.
    fn awaited(&mut self) -> &BTreeSet<u32> {
        let Self { members, given, round, awaited, .. } = self;
        awaited.get_or_insert_with(|| {
            let is_awaited =
                |(trainer, from): (&u32, &u64)| (*from <= *round && !given.contains(trainer)).then_some(*trainer);
            members.iter().filter_map(is_awaited).collect()
        })
    }

    /// Records that members, the open round or their steps have changed by more than one gradient.
    fn recount(&mut self) {
        self.awaited = None;
        if self.consistency.mode != ConsistencyMode::Bounded {
            return;
        }
        let steps = self.members.keys().map(|member| self.next_step(*member));
        self.slowest = steps.fold(None, |slowest: Option<(u64, usize)>, step| match slowest {
            Some((least, count)) if least < step => Some((least, count)),
            Some((least, count)) if least == step => Some((least, count + 1)),
            _ => Some((step, 1)),
        });
    }

    /// Records that one member whose next step was `step` has a later one, or is no member any more.
    fn no_longer_at(&mut self, step: u64) {
        let Some((least, count)) = &mut self.slowest else { return };
        if step == *least {
            *count -= 1;
            if *count == 0 {
                self.recount();
            }
        }
    }

    /// Skips rounds that no trainer gives to any more, because those that began them have left.
    fn skip_rounds(&mut self) {
        if self.counts_rounds()
            && self.given.is_empty()
            && let Some(first) = self.members.values().min()
        {
            self.round = self.round.max(*first);
            self.awaited = None;
        }
    }

    fn counts_rounds(&self) -> bool {
        self.elastic && self.consistency.mode == ConsistencyMode::Sync
    }

    fn has_backups(&self) -> bool {
        self.consistency.backup_trainers > 0
    }
}

#[cfg(test)]
mod tests;
