//! Announces the examples of the next steps to the data set, each step once.

use super::Dataset;
use super::sampler::{Part, Sampler};

/// The steps that were announced.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadingAhead {
    /// The first one that was not.
    next: u64,
}

impl ReadingAhead {
    /// Announces what a trainer reads in `part` of the steps behind `step`. At the end of an epoch the order of the next one is
    /// not known; its steps are announced when its first one is read.
    pub fn announce(&mut self, data: &impl Dataset, sampler: &Sampler, step: u64, part: Part) {
        for later in self.next.max(step + 1)..=step + data.ahead() {
            let Some(examples) = sampler.ahead(later, part) else { return };
            data.will_read(examples);
            self.next = later + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::super::sampler::Split;
    use super::*;

    /// Notes what is announced.
    struct Noting(RefCell<Vec<Vec<i64>>>);

    impl Dataset for Noting {
        type Batch = ();

        fn examples(&self) -> usize {
            24
        }

        fn batch(&self, _: &[i64]) {}

        fn ahead(&self) -> u64 {
            3
        }

        fn will_read(&self, examples: &[i64]) {
            self.0.borrow_mut().push(examples.to_vec());
        }
    }

    #[test]
    fn every_step_behind_the_first_is_announced_once() {
        let split = Split { examples: 24, batch: 2, trainers: 2, seed: 3 };
        let (mut sampler, mut ahead) = (split.sampler(1).expect("enough"), ReadingAhead::default());
        let (data, part) = (Noting(RefCell::default()), split.part(1));
        let mut read = Vec::new();
        for step in 0..12 {
            read.push(sampler.batch(step).to_vec());
            ahead.announce(&data, &sampler, step, part);
        }
        // Six steps are an epoch; the first step of each is read before it can be announced.
        let want = read.iter().enumerate().filter(|(step, _)| step % 6 != 0).map(|(_, read)| read.clone());
        let want: Vec<_> = want.collect();
        assert_eq!(*data.0.borrow(), want);
    }
}
