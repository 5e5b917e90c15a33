//! Which examples this trainer reads in which step; the same as a trainer of `psjobs-worker` reads.

use psjobs_ps::batch::sampler::{self, Part, Split};
use pyo3::prelude::*;

use super::errors::InputError;

/// One trainer's part of a data set.
#[pyclass(module = "psjobs._native")]
pub struct Sampler {
    sampler: sampler::Sampler,
    #[pyo3(get)]
    steps_per_epoch: u64,
}

#[pymethods]
impl Sampler {
    /// Shares `examples` out: each of `trainers` reads `batch` of them in a step.
    #[new]
    fn new(examples: usize, batch: usize, trainers: usize, trainer: usize, seed: u64) -> PyResult<Self> {
        if batch == 0 || trainer >= trainers {
            return Err(InputError::new_err(format!("trainer {trainer} of {trainers} cannot read batches of {batch}")));
        }
        let split = Split { examples, batch, trainers, seed };
        let wrong = |error: sampler::TooFewExamples| InputError::new_err(error.to_string());
        let steps_per_epoch = split.steps_per_epoch().map_err(wrong)?;
        Ok(Self { sampler: split.sampler(trainer).map_err(wrong)?, steps_per_epoch })
    }

    /// The examples of a step, counted from 0 over all epochs.
    fn batch(&mut self, step: u64) -> Vec<i64> {
        self.sampler.batch(step).to_vec()
    }

    /// So many examples of a step from one on, of those of all trainers.
    fn part(&mut self, step: u64, offset: usize, examples: usize) -> Vec<i64> {
        self.sampler.part(step, Part { offset, examples }).to_vec()
    }
}
