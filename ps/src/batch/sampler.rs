//! Which examples a trainer reads in which step. Pure: the answer follows from the seed and the
//! step alone, so a restarted trainer goes on where it was, and all trainers agree without talking.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// The settings that all trainers share, so that they split the data without overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Examples in the training set.
    pub examples: usize,
    /// Examples a trainer reads in one step.
    pub batch: usize,
    /// Trainers that share the set.
    pub trainers: usize,
    /// Seed of the order; each epoch has its own.
    pub seed: u64,
}

/// A trainer's examples of a step, of those of all trainers that lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first one.
    pub offset: usize,
    /// How many.
    pub examples: usize,
}

/// The training set is smaller than one step of all trainers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "one step of {trainers} trainers with batch size {batch} needs {} examples, but there are {examples}; \
     use a smaller batch size or fewer trainers", batch * trainers
)]
pub struct TooFewExamples {
    examples: usize,
    batch: usize,
    trainers: usize,
}

/// One trainer's batches. An epoch is one pass of all trainers together over the shuffled set: in
/// every step they read neighbouring slices of it, so N trainers with batch B read what one trainer
/// with batch N·B would. Examples that do not fill a whole step are left out of that epoch.
#[derive(Clone, Debug)]
pub struct Sampler {
    split: Split,
    trainer: usize,
    /// The epoch that `order` is of.
    epoch: Option<u64>,
    order: Vec<i64>,
}

impl Split {
    /// Steps in one epoch, the same for every trainer.
    ///
    /// # Errors
    /// If the set is too small for a single step.
    pub fn steps_per_epoch(&self) -> Result<u64, TooFewExamples> {
        let &Self { examples, batch, trainers, .. } = self;
        match examples / (batch * trainers) {
            0 => Err(TooFewExamples { examples, batch, trainers }),
            steps => Ok(steps as u64),
        }
    }

    /// The part of a trainer if all read as many examples.
    #[must_use]
    pub fn part(&self, trainer: usize) -> Part {
        Part { offset: trainer * self.batch, examples: self.batch }
    }

    /// The batches of one trainer.
    ///
    /// # Errors
    /// If the set is too small for a single step.
    ///
    /// # Panics
    /// If there is no trainer of that index.
    pub fn sampler(self, trainer: usize) -> Result<Sampler, TooFewExamples> {
        assert!(trainer < self.trainers, "trainer {trainer} of {}", self.trainers);
        self.steps_per_epoch()?;
        Ok(Sampler { split: self, trainer, epoch: None, order: (0..self.examples as i64).collect() })
    }
}

impl Sampler {
    /// The examples that this trainer reads in `step`, counted from 0 over all epochs.
    pub fn batch(&mut self, step: u64) -> &[i64] {
        self.part(step, self.split.part(self.trainer))
    }

    /// The examples of `step` that lie in `part`.
    ///
    /// # Panics
    /// If a step has not as many.
    pub fn part(&mut self, step: u64, part: Part) -> &[i64] {
        let together = self.split.batch * self.split.trainers;
        assert!(part.offset + part.examples <= together, "{part:?} of {together} examples");
        let steps = (self.split.examples / together) as u64;
        self.shuffle(step / steps);
        let start = (step % steps) as usize * together + part.offset;
        &self.order[start..start + part.examples]
    }

    /// The examples of a later `step` that lie in `part`, to fetch them ahead; `None` if they are of another epoch than those
    /// asked for last, whose order is not known yet.
    #[must_use]
    pub fn ahead(&self, step: u64, part: Part) -> Option<&[i64]> {
        let together = self.split.batch * self.split.trainers;
        let steps = (self.split.examples / together) as u64;
        if self.epoch != Some(step / steps) {
            return None;
        }
        let start = (step % steps) as usize * together + part.offset;
        self.order.get(start..start + part.examples)
    }

    /// This trainer's part of a step if all read as many examples.
    #[must_use]
    pub fn even(&self) -> Part {
        self.split.part(self.trainer)
    }

    fn shuffle(&mut self, epoch: u64) {
        if self.epoch == Some(epoch) {
            return;
        }
        // From the identity, not from the last epoch's order: the order must not depend on the way here.
        self.order.iter_mut().zip(0..).for_each(|(place, example)| *place = example);
        let mut random = ChaCha8Rng::seed_from_u64(self.split.seed);
        random.set_stream(epoch);
        self.order.shuffle(&mut random);
        self.epoch = Some(epoch);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn splits() -> impl Strategy<Value = Split> {
        (1usize..9, 1usize..6, 1usize..12, 0usize..40, any::<u64>()).prop_map(|(batch, trainers, steps, rest, seed)| {
            let examples = batch * trainers * steps + rest % (batch * trainers);
            Split { examples, batch, trainers, seed }
        })
    }

    fn epoch(split: Split, trainer: usize, epoch: u64) -> Vec<i64> {
        let steps = split.steps_per_epoch().expect("enough");
        let mut sampler = split.sampler(trainer).expect("enough");
        (epoch * steps..(epoch + 1) * steps).flat_map(|step| sampler.batch(step).to_vec()).collect()
    }

    proptest! {
        #[test]
        fn trainers_never_share_an_example_and_leave_out_less_than_a_step(split in splits(), number in 0u64..3) {
            let read: Vec<i64> = (0..split.trainers).flat_map(|trainer| epoch(split, trainer, number)).collect();
            let distinct: BTreeSet<i64> = read.iter().copied().collect();
            prop_assert_eq!(distinct.len(), read.len());
            prop_assert!(distinct.iter().all(|&example| (0..split.examples as i64).contains(&example)));
            prop_assert!(split.examples - read.len() < split.batch * split.trainers);
        }

        #[test]
        fn any_step_can_be_resumed_from(split in splits(), step in 0u64..40, before in 0u64..40) {
            let mut fresh = split.sampler(0).expect("enough");
            let mut used = split.sampler(0).expect("enough");
            used.batch(before);
            prop_assert_eq!(used.batch(step), fresh.batch(step));
        }

        #[test]
        fn what_is_said_ahead_is_what_is_read_later(split in splits(), step in 0u64..40, later in 0u64..40) {
            let mut sampler = split.sampler(0).expect("enough");
            prop_assert_eq!(sampler.ahead(step, sampler.even()), None, "nothing was asked for yet");
            sampler.batch(step);
            let ahead = sampler.ahead(step + later, sampler.even()).map(<[i64]>::to_vec);
            let steps = split.steps_per_epoch().expect("enough");
            prop_assert_eq!(ahead.is_some(), step / steps == (step + later) / steps);
            prop_assert!(ahead.is_none_or(|ahead| ahead == sampler.batch(step + later)));
        }

        #[test]
        fn together_the_trainers_read_what_one_with_the_joined_batch_reads(split in splits(), step in 0u64..20) {
            let joined = Split { batch: split.batch * split.trainers, trainers: 1, ..split };
            let apart: Vec<i64> = (0..split.trainers)
                .flat_map(|trainer| split.sampler(trainer).expect("enough").batch(step).to_vec())
                .collect();
            let mut joined = joined.sampler(0).expect("enough");
            prop_assert_eq!(apart.as_slice(), joined.batch(step));
        }
    }

    #[test]
    fn parts_of_a_step_are_those_of_one_joined_batch() {
        let split = Split { examples: 100, batch: 8, trainers: 3, seed: 1 };
        let mut sampler = split.sampler(0).expect("enough");
        let mut joined = Split { batch: 24, trainers: 1, ..split }.sampler(0).expect("enough");
        let parts = [(0, 3), (3, 20), (23, 1)].map(|(offset, examples)| Part { offset, examples });
        for step in 0..9 {
            let read: Vec<i64> = parts.iter().flat_map(|part| sampler.part(step, *part).to_vec()).collect();
            assert_eq!(read, joined.batch(step), "step {step}");
        }
    }

    #[test]
    fn every_epoch_and_every_seed_has_its_own_order() {
        let split = Split { examples: 1000, batch: 10, trainers: 1, seed: 7 };
        assert_ne!(epoch(split, 0, 0), epoch(split, 0, 1));
        assert_ne!(epoch(split, 0, 0), epoch(Split { seed: 8, ..split }, 0, 0));
        assert_eq!(epoch(split, 0, 3), epoch(split, 0, 3));
    }

    #[test]
    fn a_set_smaller_than_one_step_is_refused_with_the_numbers() {
        let split = Split { examples: 60, batch: 32, trainers: 2, seed: 1 };
        let error = split.sampler(0).expect_err("64 are needed").to_string();
        assert!(error.contains("64") && error.contains("60"), "{error}");
    }
}
