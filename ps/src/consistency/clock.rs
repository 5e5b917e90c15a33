//! The clocks of stale synchronous parallel (Ho et al., NIPS 2013): each trainer's clock counts the
//! steps it has done, and a trainer may begin its next one while its clock is at most `staleness`
//! ahead of the slowest. Pure: who may go on follows from who arrived.

/// Clocks of all trainers, and who waits for the slowest.
#[derive(Clone, Debug)]
pub struct Clocks {
    staleness: u64,
    trainers: Vec<Trainer>,
}

#[derive(Clone, Debug, Default)]
struct Trainer {
    clock: u64,
    waits: bool,
    /// Has left: nobody waits for it.
    finished: bool,
}

impl Clocks {
    /// All clocks at 0. A trainer that has not come yet is a slow one: others wait for it once they
    /// are `staleness` ahead.
    #[must_use]
    pub fn new(trainers: usize, staleness: u64) -> Self {
        Self { staleness, trainers: vec![Trainer::default(); trainers] }
    }

    /// Steps that `trainer` has done.
    #[must_use]
    pub fn clock(&self, trainer: usize) -> u64 {
        self.trainers[trainer].clock
    }

    /// Clock of the slowest trainer; none once all have finished.
    #[must_use]
    pub fn slowest(&self) -> Option<u64> {
        self.trainers.iter().filter(|trainer| !trainer.finished).map(|trainer| trainer.clock).min()
    }

    /// `trainer` has done `clock` steps and asks to go on. Returns all that may go on now, itself
    /// among them if it may, by index. A clock never goes back: a lower one counts as the present one.
    pub fn arrive(&mut self, trainer: usize, clock: u64) -> Vec<usize> {
        let entry = &mut self.trainers[trainer];
        entry.clock = entry.clock.max(clock);
        entry.waits = true;
        entry.finished = false;
        self.release()
    }

    /// `trainer` has left well and holds up nobody any more. Returns all that may go on now.
    pub fn finish(&mut self, trainer: usize) -> Vec<usize> {
        self.trainers[trainer].finished = true;
        self.trainers[trainer].waits = false;
        self.release()
    }

    fn release(&mut self) -> Vec<usize> {
        let Some(slowest) = self.slowest() else { return Vec::new() };
        let limit = slowest.saturating_add(self.staleness);
        let free = |trainer: &Trainer| trainer.waits && trainer.clock <= limit;
        let released = self.trainers.iter_mut().enumerate().filter(|(_, trainer)| free(trainer));
        released
            .map(|(index, trainer)| {
                trainer.waits = false;
                index
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fast_wait_for_the_slowest_and_no_longer() {
        let mut clocks = Clocks::new(3, 2);
        for step in 1..=2 {
            assert_eq!(clocks.arrive(0, step), [0], "within the bound");
        }
        assert_eq!(clocks.arrive(0, 3), [0; 0], "three ahead of two that have not come");
        assert_eq!(clocks.arrive(1, 1), [1]);
        assert_eq!(clocks.arrive(2, 1), [0, 2], "now it is two ahead");
        assert_eq!(clocks.slowest(), Some(1));
    }

    #[test]
    fn a_trainer_that_finished_holds_up_nobody() {
        let mut clocks = Clocks::new(2, 0);
        assert_eq!(clocks.arrive(0, 1), [0; 0]);
        assert_eq!(clocks.finish(1), [0]);
        assert_eq!(clocks.arrive(0, 2), [0]);
        assert_eq!(clocks.finish(0), [0; 0]);
        assert_eq!(clocks.slowest(), None);
    }

    proptest! {
        /// Trainers arrive in any order; a trainer that was not released cannot arrive.
        #[test]
        fn clocks_are_monotone_bounded_and_never_stuck(
            trainers in 1..6_usize,
            staleness in 0..5_u64,
            choices in prop::collection::vec((any::<prop::sample::Index>(), 0..20_u8), 1..200),
        ) {
            let mut clocks = Clocks::new(trainers, staleness);
            let mut steps = vec![0_u64; trainers];
            let mut running: Vec<usize> = (0..trainers).collect();
            let mut finished = vec![false; trainers];
            for (choice, kind) in choices {
                if finished.iter().all(|f| *f) {
                    break;
                }
                prop_assert!(!running.is_empty(), "deadlock at {steps:?}");
                let trainer = running.swap_remove(choice.index(running.len()));
                let before = clocks.slowest();
                let released = if kind == 0 {
                    finished[trainer] = true;
                    clocks.finish(trainer)
                } else {
                    steps[trainer] += 1;
                    clocks.arrive(trainer, steps[trainer])
                };
                prop_assert!(released.iter().all(|t| !running.contains(t) && !finished[*t]), "released once");
                running.extend(released);
                prop_assert!(clocks.slowest().is_none() || clocks.slowest() >= before, "clocks are monotone");
                for (trainer, done) in steps.iter().enumerate() {
                    prop_assert_eq!(clocks.clock(trainer), *done);
                }
                if let Some(slowest) = clocks.slowest() {
                    for trainer in (0..trainers).filter(|t| !finished[*t]) {
                        let ahead = steps[trainer] - slowest;
                        prop_assert!(ahead <= staleness + 1, "{steps:?}, staleness {staleness}");
                        prop_assert_eq!(running.contains(&trainer), ahead <= staleness, "{:?}", steps);
                    }
                }
            }
        }
    }
}
