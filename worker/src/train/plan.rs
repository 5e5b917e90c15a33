//! How long and on what a trainer trains.

use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use psjobs_api::training::NonFinite;
use tch::Device;

use super::throttle::Pace;

/// How long and on what this trainer trains.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Passes of all trainers together over the training set.
    pub epochs: u64,
    /// Ends earlier, after this many steps.
    pub max_steps: Option<u64>,
    /// Examples a trainer reads in one step.
    pub batch: usize,
    /// Micro-batches in which the gradient of a step of so many examples is computed.
    pub micro_batches: usize,
    /// The loss is computed under autocast to bf16.
    pub autocast: bool,
    /// Trainers come and go: each reads what server 0 deals it, and the steps of all count together.
    pub elastic: bool,
    /// Examples of a step are dealt out by the trainers' speed, `batch` for each on average.
    pub adaptive: bool,
    /// Steps that a trainer makes for one exchange with the servers; more than 1 in a job with local steps.
    pub steps_per_exchange: u64,
    /// A step whose loss is NaN or infinite ends the trainer, or training goes on.
    pub non_finite: NonFinite,
    /// Seed of initial parameters, order of the data and dropout.
    pub seed: u64,
    /// This trainer's index, and how many there are.
    pub trainer: usize,
    pub trainers: usize,
    pub device: Device,
    /// Steps between two lines in the log.
    pub log_every: u64,
    /// Time from one evaluation to the next while training goes on; `None`: only at the end.
    pub evaluate_every: Option<Duration>,
    /// Rests between steps, if this trainer is to be a slow one.
    pub pace: Pace,
    /// Takes the trained model, from the first trainer.
    pub save: Option<PathBuf>,
}

/// The batch that is read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The step that it is read in.
    pub step: u64,
    /// Its number: the step, or in an elastic job that of the batch, of all that the trainers read together.
    pub number: u64,
}

impl Plan {
    /// Returns the number of steps of the training, where an epoch has `per_epoch`.
    #[must_use]
    pub fn total_steps(&self, per_epoch: u64) -> u64 {
        let total = self.epochs.saturating_mul(per_epoch);
        self.max_steps.map_or(total, |most| most.min(total))
    }

    /// Returns the most examples of a micro-batch, also in a step that reads more or fewer than others.
    pub(super) fn micro_batch(&self) -> usize {
        self.batch.div_ceil(self.micro_batches.max(1))
    }

    /// Returns the exchanges with the servers in which `total` steps are made, the last one perhaps of fewer.
    #[must_use]
    pub fn exchanges(&self, total: u64) -> u64 {
        total.div_ceil(self.steps_per_exchange)
    }

    /// Returns the batches, of `total`, that a trainer of an elastic job reads for the exchange `unit`.
    pub(super) fn batches_of(&self, unit: u64, total: u64) -> Range<u64> {
        let first = unit.saturating_mul(self.steps_per_exchange);
        first..first.saturating_add(self.steps_per_exchange).min(total)
    }

    /// Returns this trainer's place among those that share the steps out between them.
    pub(super) fn reader(&self) -> usize {
        if self.elastic { 0 } else { self.trainer }
    }

    /// Rests after `step`, in which this trainer computed with `examples` for `busy`, if it is to be a slow one.
    pub fn rest(&self, step: u64, examples: usize, busy: Duration) {
        thread::sleep(self.pace.rest(self.trainer, step, self.seed, examples, busy));
    }

    /// Returns whether this trainer evaluates now, `since` its last time. Only the first trainer evaluates.
    pub(super) fn evaluation_is_due(&self, since: Duration) -> bool {
        self.trainer == 0 && self.evaluate_every.is_some_and(|period| since >= period)
    }
}
