//! Aggregates the gradients of trainers: decides by the consistency rule when a gradient takes effect, adds up those of an
//! open round in trainer order, and releases the trainers that may continue. Blocks of dense parameters and shards of
//! sparse rows use it; it knows neither what a gradient is nor how a trainer is answered. Pure: no clock and no I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::consistency::{Rule, Verdict};

/// The aggregation of one block or shard. `G` is a gradient, `S` a sum of gradients, `W` a trainer that waits for an
/// answer.
pub struct Aggregation<G, S, W> {
    pub rule: Rule,
    round: Round<G, S, W>,
    /// Trainers whose gradient was applied, but that may be too far ahead of others to be answered, with their step.
    ahead: Vec<(u64, W)>,
}

/// The gradients of the open round.
struct Round<G, S, W> {
    /// Sum of the gradients added so far, in trainer order.
    sum: Option<S>,
    /// Number of gradients in `sum`.
    added: usize,
    /// Gradients that arrived before those of lower trainers; `None` for one that is left out as not finite.
    early: BTreeMap<u32, Option<G>>,
    /// The highest step among the gradients.
    step: u64,
    /// Trainers that are answered when the round closes.
    waiting: Vec<W>,
}

/// A gradient as a trainer sent it.
pub struct Contribution<G, W> {
    pub trainer: u32,
    pub step: u64,
    /// True if it was computed from values older than the current ones.
    pub stale: bool,
    /// `None` counts as given and changes nothing.
    pub gradient: Option<G>,
    pub waiting: W,
}

/// The action that a contribution needs of the caller.
#[derive(Debug, PartialEq)]
pub enum Outcome<G, W> {
    /// Apply the gradient, then answer those that are [`Aggregation::released`].
    Apply(Option<G>),
    /// Answer those that are [`Aggregation::released`]: the gradient was applied before.
    Release,
    /// Close the round if it is complete, by [`Aggregation::advance`].
    Advance,
    /// Nothing: the gradient is part of the open round already.
    Wait,
    /// Answer the trainer: the gradient is left out, because its round closed without it.
    Drop(W),
    /// Refuse the trainer, which has to enter again: its round closed without it.
    Late(W),
}

/// A round that has closed.
#[derive(Debug, PartialEq)]
pub struct Closed<S, W> {
    /// The sum of its gradients and their number; `None` if all were left out.
    pub sum: Option<(S, usize)>,
    /// The highest step among them.
    pub step: u64,
    pub contributors: BTreeSet<u32>,
    /// The trainers to answer.
    pub waiting: Vec<W>,
}

impl<G, S, W> Aggregation<G, S, W> {
    /// Begins with an empty round.
    pub fn new(rule: Rule) -> Self {
        Self { rule, round: Round::default(), ahead: Vec::new() }
    }

    /// Takes a contribution.
    pub fn offer(&mut self, contribution: Contribution<G, W>) -> Outcome<G, W> {
        let Contribution { trainer, step, stale, gradient, waiting } = contribution;
        match self.rule.offer(trainer, step, stale) {
            Verdict::Apply => {
                self.ahead.push((step, waiting));
                Outcome::Apply(gradient)
            }
            Verdict::Answer => {
                self.ahead.push((step, waiting));
                Outcome::Release
            }
            Verdict::Join => {
                self.round.waiting.push(waiting);
                Outcome::Wait
            }
            Verdict::Hold => {
                self.round.early.insert(trainer, gradient);
                self.round.step = self.round.step.max(step);
                self.round.waiting.push(waiting);
                Outcome::Advance
            }
            Verdict::Drop => Outcome::Drop(waiting),
            Verdict::Late => Outcome::Late(waiting),
        }
    }

    /// Adds the early gradients whose turn in trainer order has come, by `add`; returns the round if that closes it.
    pub fn advance(&mut self, mut add: impl FnMut(&mut Option<S>, G)) -> Option<Closed<S, W>> {
        let Self { rule, round, .. } = self;
        while let Some(first) = round.early.first_entry().filter(|first| rule.in_turn(*first.key())) {
            let gradient = first.remove();
            round.add(gradient, &mut add);
        }
        let contributors = rule.close_round()?;
        while let Some((_, gradient)) = round.early.pop_first() {
            round.add(gradient, &mut add);
        }
        let Round { sum, added, step, waiting, .. } = std::mem::take(round);
        Some(Closed { sum: sum.map(|sum| (sum, added)), step, contributors, waiting })
    }

    /// Returns the trainers that may continue because no other trainer is too far behind them.
    pub fn released(&mut self) -> Vec<W> {
        self.ahead.extract_if(.., |(step, _)| self.rule.may_go_on(*step)).map(|(_, waiting)| waiting).collect()
    }

    /// Goes to where each trainer's next step is the one in `steps`; forgets the open round and all that wait.
    pub fn restore(&mut self, steps: &[u64]) {
        self.rule.restore(steps);
        self.round = Round::default();
        self.ahead.clear();
    }
}

impl<G, S, W> Round<G, S, W> {
    fn add(&mut self, gradient: Option<G>, add: &mut impl FnMut(&mut Option<S>, G)) {
        if let Some(gradient) = gradient {
            add(&mut self.sum, gradient);
            self.added += 1;
        }
    }
}

impl<G, S, W> Default for Round<G, S, W> {
    fn default() -> Self {
        Self { sum: None, added: 0, early: BTreeMap::new(), step: 0, waiting: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::training::{Consistency, ConsistencyMode};

    use super::*;

    /// A gradient is text, a sum the texts one behind the other, so that a test sees the order.
    type Texts = Aggregation<&'static str, String, (u32, u64)>;

    fn aggregation(mode: ConsistencyMode, backup_trainers: u32, staleness: u32) -> Texts {
        Texts::new(Rule::new(Consistency { mode, staleness, backup_trainers, ..Consistency::default() }, 3))
    }

    fn offer(
        to: &mut Texts,
        trainer: u32,
        step: u64,
        gradient: Option<&'static str>,
    ) -> Outcome<&'static str, (u32, u64)> {
        to.offer(Contribution { trainer, step, stale: false, gradient, waiting: (trainer, step) })
    }

    fn advance(aggregation: &mut Texts) -> Option<Closed<String, (u32, u64)>> {
        aggregation.advance(|sum, gradient| sum.get_or_insert_default().push_str(gradient))
    }

    #[test]
    fn a_round_adds_in_trainer_order_whoever_came_first() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut sync = aggregation(ConsistencyMode::Sync, 0, 0);
            for (place, trainer) in order.into_iter().enumerate() {
                assert_eq!(offer(&mut sync, trainer, 5, Some(["a", "b", "c"][trainer as usize])), Outcome::Advance);
                let closed = advance(&mut sync);
                assert_eq!(closed.is_some(), place == 2, "{order:?}");
                if let Some(closed) = closed {
                    assert_eq!((closed.sum, closed.step), (Some(("abc".into(), 3)), 5), "{order:?}");
                    assert_eq!(closed.waiting, order.map(|trainer| (trainer, 5)), "{order:?}");
                    assert_eq!(closed.contributors, BTreeSet::from([0, 1, 2]));
                }
            }
        }
    }

    #[test]
    fn a_gradient_that_is_left_out_counts_for_the_round_and_not_for_the_mean() {
        let mut sync = aggregation(ConsistencyMode::Sync, 0, 0);
        for (trainer, gradient) in [(0, None), (1, Some("b")), (2, None)] {
            offer(&mut sync, trainer, 0, gradient);
        }
        assert_eq!(advance(&mut sync).and_then(|closed| closed.sum), Some(("b".into(), 1)));
        for trainer in 0..3 {
            offer(&mut sync, trainer, 1, None);
        }
        let closed = advance(&mut sync).expect("all have given");
        assert_eq!((closed.sum, closed.waiting.len()), (None, 3));
    }

    #[test]
    fn a_repeat_waits_for_its_round_and_is_added_once() {
        let mut sync = aggregation(ConsistencyMode::Sync, 0, 0);
        assert_eq!(offer(&mut sync, 0, 0, Some("a")), Outcome::Advance);
        assert_eq!(offer(&mut sync, 0, 0, Some("a")), Outcome::Wait);
        for (trainer, text) in [(1, "b"), (2, "c")] {
            offer(&mut sync, trainer, 0, Some(text));
        }
        let closed = advance(&mut sync).expect("all have given");
        assert_eq!((closed.sum, closed.waiting.len()), (Some(("abc".into(), 3)), 4));
        assert_eq!(offer(&mut sync, 1, 0, Some("b")), Outcome::Release);
        assert_eq!(sync.released(), [(1, 0)]);
    }

    #[test]
    fn a_round_with_a_backup_trainer_closes_without_the_last_one_and_drops_it() {
        let mut sync = aggregation(ConsistencyMode::Sync, 1, 0);
        for trainer in [2, 0] {
            offer(&mut sync, trainer, 0, Some(["a", "b", "c"][trainer as usize]));
        }
        assert_eq!(advance(&mut sync).and_then(|closed| closed.sum), Some(("ac".into(), 2)));
        let late = Contribution { trainer: 1, step: 0, stale: true, gradient: Some("b"), waiting: (1, 0) };
        assert_eq!(sync.offer(late), Outcome::Drop((1, 0)));
    }

    #[test]
    fn a_bounded_trainer_is_released_when_the_others_have_followed() {
        let mut bounded = aggregation(ConsistencyMode::Bounded, 0, 1);
        for step in [0, 1] {
            assert_eq!(offer(&mut bounded, 0, step, Some("a")), Outcome::Apply(Some("a")));
        }
        assert_eq!(bounded.released(), [(0, 0)], "two steps ahead is one too many");
        for trainer in [1, 2] {
            offer(&mut bounded, trainer, 0, Some("b"));
        }
        assert_eq!(bounded.released(), [(0, 1), (1, 0), (2, 0)]);
    }

    #[test]
    fn a_restored_aggregation_forgets_the_open_round() {
        let mut sync = aggregation(ConsistencyMode::Sync, 0, 0);
        offer(&mut sync, 0, 7, Some("old"));
        sync.restore(&[4, 4, 4]);
        for trainer in 0..3 {
            offer(&mut sync, trainer, 4, Some("n"));
        }
        let closed = advance(&mut sync).expect("all have given");
        assert_eq!((closed.sum, closed.step, closed.waiting.len()), (Some(("nnn".into(), 3)), 4, 3));
    }
}
