//! The shares of a job's trainers over its steps. Steps fall into spans, each with shares of its own that never
//! change once one trainer has received them: so all read other examples of a step, and the mean of a step's gradients
//! is that of its examples, in whatever order the trainers ask.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Bounds, deal, step_seconds};

/// Steps of the first span, and of one that follows a change.
const SHORTEST: u64 = 4;
/// Steps of a span when nothing has changed for a while.
const LONGEST: u64 = 32;
/// How much a new look at a trainer's speed counts against all before.
const FRESH: f64 = 0.5;
/// Examples are dealt out anew if a step then takes no more than this part of its time.
const CLEARLY: f64 = 0.95;

/// A trainer's examples of a step, of all that lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Steps before this one are meant.
    pub until: u64,
    /// Its first example.
    pub offset: u32,
    /// How many.
    pub examples: u32,
}

/// The work that a trainer's process has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Examples read.
    pub examples: u64,
    /// Time spent on them, without that spent waiting.
    pub busy: Duration,
}

/// The shares of all trainers.
#[derive(Debug)]
pub struct Sharing {
    bounds: Bounds,
    trainers: Vec<Trainer>,
    /// Spans by their first step. Before the first of them shares are even.
    spans: BTreeMap<u64, Vec<u32>>,
    /// Where the last span ends.
    end: u64,
    /// Steps of the next span.
    length: u64,
}

#[derive(Clone, Debug, Default)]
struct Trainer {
    incarnation: u32,
    work: Work,
    /// Examples a second.
    speed: Option<f64>,
    /// The step that it asked about last.
    asked: Option<u64>,
}

impl Trainer {
    fn observe(&mut self, incarnation: u32, work: Work) {
        let new = std::mem::replace(&mut self.incarnation, incarnation) != incarnation;
        let before = if new { Work::default() } else { self.work };
        self.work = work;
        let examples = work.examples.saturating_sub(before.examples);
        let busy = work.busy.saturating_sub(before.busy).as_secs_f64();
        if examples == 0 || busy <= 0.0 {
            return;
        }
        let seen = examples as f64 / busy;
        self.speed = Some(self.speed.map_or(seen, |speed| speed + FRESH * (seen - speed)));
    }
}

impl Sharing {
    /// Begins with equal shares for `trainers` trainers, because their speeds are not known.
    #[must_use]
    pub fn new(trainers: u32, bounds: Bounds) -> Self {
        let trainers = vec![Trainer::default(); trainers as usize];
        Self { bounds, trainers, spans: BTreeMap::new(), end: 0, length: SHORTEST }
    }

    /// The share of `trainer`, whose process has done `work`, in `step` and some that follow.
    ///
    /// # Panics
    /// If there is no such trainer.
    pub fn ask(&mut self, trainer: u32, incarnation: u32, work: Work, step: u64) -> Share {
        let asking = &mut self.trainers[trainer as usize];
        asking.observe(incarnation, work);
        asking.asked = Some(step);
        if step >= self.end {
            self.begin_span(step);
        }
        self.forget();
        let (shares, until) = self.span(step);
        let base = self.bounds.base;
        let Some(shares) = shares else { return Share { until, offset: trainer * base, examples: base } };
        let before = &shares[..trainer as usize];
        Share { until, offset: before.iter().sum(), examples: shares[trainer as usize] }
    }

    /// Examples of `trainer` in the last step that it asked about.
    #[must_use]
    pub fn share(&self, trainer: u32) -> u32 {
        let asked = self.trainers[trainer as usize].asked;
        asked.and_then(|step| self.span(step).0).map_or(self.bounds.base, |shares| shares[trainer as usize])
    }

    /// The shares of the span that `step` is in, and where it ends.
    fn span(&self, step: u64) -> (Option<&Vec<u32>>, u64) {
        let shares = self.spans.range(..=step).next_back().map(|(_, shares)| shares);
        let next = self.spans.range(step.saturating_add(1)..).next().map(|(first, _)| *first);
        (shares, next.unwrap_or(self.end))
    }

    /// Begins the span of `step`, because trainers have received those before it.
    fn begin_span(&mut self, step: u64) {
        let shares = self.spans.last_key_value().map(|(_, shares)| shares.clone());
        let shares = shares.unwrap_or_else(|| vec![self.bounds.base; self.trainers.len()]);
        let (shares, length) = match self.speeds() {
            None => (shares, SHORTEST),
            Some(speeds) => {
                let dealt = deal(&speeds, self.bounds);
                if step_seconds(&dealt, &speeds) <= CLEARLY * step_seconds(&shares, &speeds) {
                    (dealt, SHORTEST)
                } else {
                    (shares, (2 * self.length).min(LONGEST))
                }
            }
        };
        self.length = length;
        self.spans.insert(step, shares);
        self.end = step.saturating_add(length);
    }

    /// Once all are known.
    fn speeds(&self) -> Option<Vec<f64>> {
        self.trainers.iter().map(|trainer| trainer.speed).collect()
    }

    /// Lets spans go that all trainers have behind them.
    fn forget(&mut self) {
        let Some(slowest) = self.trainers.iter().map(|trainer| trainer.asked).min().flatten() else { return };
        let current = self.spans.range(..=slowest).next_back().map(|(first, _)| *first);
        if let Some(current) = current {
            self.spans = self.spans.split_off(&current);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds { base: 32, min: 1, max: 128 };

    /// Trainers that take `fixed` seconds for a step and `each` for an example, and go in step.
    struct Job {
        sharing: Sharing,
        costs: Vec<(f64, f64)>,
        work: Vec<Work>,
        received: Vec<Option<Share>>,
        step: u64,
    }

    impl Job {
        fn new(costs: &[(f64, f64)]) -> Self {
            let sharing = Sharing::new(costs.len() as u32, BOUNDS);
            let (work, received) = (vec![Work::default(); costs.len()], vec![None; costs.len()]);
            Self { sharing, costs: costs.to_vec(), work, received, step: 0 }
        }

        /// Does a step; what each trainer takes for it.
        fn step(&mut self) -> Vec<f64> {
            let mut took = Vec::new();
            for (index, (fixed, each)) in self.costs.clone().into_iter().enumerate() {
                if self.received[index].is_none_or(|share| share.until <= self.step) {
                    self.received[index] = Some(self.sharing.ask(index as u32, 0, self.work[index], self.step));
                }
                let examples = self.received[index].expect("received").examples;
                let seconds = fixed + each * f64::from(examples);
                self.work[index].examples += u64::from(examples);
                self.work[index].busy += Duration::from_secs_f64(seconds);
                took.push(seconds);
            }
            self.step += 1;
            took
        }

        fn shares(&self) -> Vec<u32> {
            self.received.iter().map(|share| share.expect("received").examples).collect()
        }
    }

    /// Returns the worst share of time that a fast trainer waits.
    fn waiting(took: &[f64]) -> f64 {
        let (slowest, fastest) = (took.iter().copied().fold(0.0, f64::max), took.iter().copied().fold(9e9, f64::min));
        1.0 - fastest / slowest
    }

    #[test]
    fn a_slow_trainer_is_waited_for_no_longer() {
        type Row = (&'static str, &'static [(f64, f64)]);
        let rows: [Row; 3] = [
            ("by the example", &[(0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 3.0)]),
            ("with a part that is always the same", &[(8.0, 1.0), (8.0, 1.0), (8.0, 1.0), (24.0, 3.0)]),
            ("two, one of them five times slower", &[(1.0, 1.0), (5.0, 5.0)]),
        ];
        for (what, costs) in rows {
            let mut job = Job::new(costs);
            assert!(waiting(&job.step()) > 0.6, "{what}: even at first");
            (0..60).for_each(|_| drop(job.step()));
            let waiting = waiting(&job.step());
            assert!(waiting < 0.08, "{what}: {waiting} of the time with {:?}", job.shares());
        }
    }

    #[test]
    fn small_differences_change_nothing() {
        let mut job = Job::new(&[(0.0, 1.0), (0.0, 1.03), (0.0, 0.98)]);
        (0..100).for_each(|_| drop(job.step()));
        assert_eq!(job.shares(), [32, 32, 32]);
    }

    #[test]
    fn speeds_that_are_not_all_known_change_nothing() {
        let mut sharing = Sharing::new(2, BOUNDS);
        let mut step = 0;
        for round in 0..20 {
            let work = Work { examples: 100 * round, busy: Duration::from_secs(round) };
            let share = sharing.ask(1, 0, work, step);
            assert_eq!((share.offset, share.examples), (32, 32));
            step = share.until;
        }
    }

    #[test]
    fn a_replaced_trainer_is_measured_anew() {
        let mut trainer = Trainer::default();
        let work = |examples, seconds| Work { examples, busy: Duration::from_secs(seconds) };
        trainer.observe(0, work(1000, 10));
        assert_eq!(trainer.speed, Some(100.0));
        trainer.observe(1, work(30, 1));
        assert_eq!(trainer.speed, Some(65.0), "30 examples a second, not fewer than before");
        trainer.observe(1, work(30, 9));
        assert_eq!(trainer.speed, Some(65.0), "nothing was read");
    }

    proptest! {
        /// Trainers ask in any order, and go back where the servers did: the shares of a step never overlap and leave
        /// no example out, unless a trainer is far behind all that the servers remember.
        #[test]
        fn shares_of_a_step_lie_one_behind_the_other(
            asks in prop::collection::vec((0u32..3, 0u64..200, 1u64..500), 1..80),
        ) {
            let mut sharing = Sharing::new(3, BOUNDS);
            let (mut at, mut work) = ([0_u64; 3], [Work::default(); 3]);
            let mut received: BTreeMap<u64, BTreeMap<u32, Share>> = BTreeMap::new();
            for (trainer, examples, ms) in asks {
                let place = trainer as usize;
                work[place].examples += examples;
                work[place].busy += Duration::from_millis(ms);
                let share = sharing.ask(trainer, 0, work[place], at[place]);
                prop_assert!(share.until > at[place]);
                for step in at[place]..share.until {
                    received.entry(step).or_default().insert(trainer, share);
                }
                at[place] = share.until;
            }
            for (step, shares) in received.iter().filter(|(_, shares)| shares.len() == 3) {
                let mut next = 0;
                for share in shares.values() {
                    prop_assert_eq!(share.offset, next, "step {}", step);
                    next += share.examples;
                }
                prop_assert_eq!(next, 96, "step {}", step);
            }
        }
    }
}
