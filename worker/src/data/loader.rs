//! Reads batches on a thread of its own, ahead of the trainer, which so finds the next one ready when
//! it has done with the last.

use std::ops::Range;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};

use super::sampler::Sampler;
use super::{Dataset, ReadError, ReadingAhead};

/// Batches that wait for the trainer, beside the one being read: enough to hide a slow one, few enough
/// to cost no memory.
const AHEAD: usize = 2;

/// The batches of one trainer, step by step.
#[derive(Debug)]
pub struct Loader<B> {
    /// `None` only while the loader is dropped.
    batches: Option<Receiver<Result<B, ReadError>>>,
    thread: Option<JoinHandle<()>>,
    next_step: u64,
}

/// The thread has ended before the last step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoaderEnded {
    #[error("reading the data failed; the log says with what")]
    Panicked,
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl LoaderEnded {
    /// Returns true if the data is wrong, so that starting the trainer again cannot help.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::Read(error) if error.is_input)
    }
}

impl<B: Send + 'static> Loader<B> {
    /// Begins to read what `sampler` selects for `steps`.
    ///
    /// # Panics
    /// If the system has no thread left.
    pub fn start<D>(data: D, mut sampler: Sampler, steps: Range<u64>) -> Self
    where
        D: Dataset<Batch = B> + Send + 'static,
    {
        let (mut ahead, part) = (ReadingAhead::default(), sampler.even());
        Self::read(steps, move |step| {
            let batch = data.read(sampler.batch(step));
            ahead.announce(&data, &sampler, step, part);
            Some(batch)
        })
    }

    /// Begins to read the batches of `steps` by `batch`, which ends it with `None` or an error.
    ///
    /// # Panics
    /// If the system has no thread left.
    pub fn read(
        steps: Range<u64>,
        mut batch: impl FnMut(u64) -> Option<Result<B, ReadError>> + Send + 'static,
    ) -> Self {
        let (sender, batches) = mpsc::sync_channel(AHEAD);
        let next_step = steps.start;
        let read = move || {
            for step in steps {
                let Some(batch) = batch(step) else { return };
                let is_last = batch.is_err();
                // The trainer may want no more.
                if sender.send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("loader".into()).spawn(read).expect("the system has threads");
        Self { batches: Some(batches), thread: Some(thread), next_step }
    }

    /// The step that [`Loader::next_batch`] gives the batch of.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// The batch of the next step; waits until it is read.
    ///
    /// # Errors
    /// If reading has failed, or all steps were read.
    pub fn next_batch(&mut self) -> Result<B, LoaderEnded> {
        self.next_step += 1;
        let batch = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        Ok(batch.ok_or(LoaderEnded::Panicked)??)
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        self.batches = None; // The thread notices when it sends, and ends.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // If it panicked, that has been logged.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sampler::Split;
    use super::*;

    /// Gives the examples' numbers; fails at one of them.
    struct Numbers {
        damaged: Option<i64>,
    }

    impl Dataset for Numbers {
        type Batch = Vec<i64>;

        fn examples(&self) -> usize {
            12
        }

        fn batch(&self, examples: &[i64]) -> Vec<i64> {
            assert!(!self.damaged.is_some_and(|damaged| examples.contains(&damaged)), "example is damaged");
            examples.to_vec()
        }
    }

    fn sampler() -> Sampler {
        Split { examples: 12, batch: 2, trainers: 2, seed: 5 }.sampler(1).expect("enough")
    }

    #[test]
    fn batches_come_in_the_order_of_the_steps_from_any_step_on() {
        let mut loader = Loader::start(Numbers { damaged: None }, sampler(), 2..8);
        let mut sampler = sampler();
        for step in 2..8 {
            assert_eq!(loader.next_step(), step);
            assert_eq!(loader.next_batch().as_deref(), Ok(sampler.batch(step)), "step {step}");
        }
        assert_eq!(loader.next_batch(), Err(LoaderEnded::Panicked));
    }

    #[test]
    fn a_loader_that_is_no_longer_wanted_ends() {
        let mut loader = Loader::start(Numbers { damaged: None }, sampler(), 0..u64::MAX);
        loader.next_batch().expect("there are steps");
        drop(loader); // Waits for the thread.
    }

    #[test]
    fn an_example_that_cannot_be_read_ends_the_batches_with_its_error() {
        let error = || ReadError { text: "x.csv: line 3".into(), is_input: true };
        let read = move |step| Some(if step < 1 { Ok(step) } else { Err(error()) });
        let mut loader = Loader::read(0..9, read);
        assert_eq!(loader.next_batch(), Ok(0));
        let ended = loader.next_batch().expect_err("it cannot be read");
        assert_eq!(ended, LoaderEnded::Read(error()));
        assert!(ended.is_input());
        assert_eq!(loader.next_batch(), Err(LoaderEnded::Panicked));
    }

    #[test]
    fn a_failure_to_read_ends_the_batches_instead_of_the_process() {
        let damaged = sampler().batch(1)[0];
        let mut loader = Loader::start(Numbers { damaged: Some(damaged) }, sampler(), 0..3);
        assert!(loader.next_batch().is_ok());
        assert_eq!(loader.next_batch(), Err(LoaderEnded::Panicked));
    }
}
