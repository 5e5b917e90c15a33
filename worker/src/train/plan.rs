//! How long and on what a trainer trains.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

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
    /// Trainers come and go: each reads what server 0 deals it, and the steps of all count together.
    pub elastic: bool,
    /// Examples of a step are dealt out by the trainers' speed, `batch` for each on average.
    pub adaptive: bool,
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

impl Plan {
    /// Returns the number of steps of the training, where an epoch has `per_epoch`.
    #[must_use]
    pub fn total_steps(&self, per_epoch: u64) -> u64 {
        let total = self.epochs.saturating_mul(per_epoch);
        self.max_steps.map_or(total, |most| most.min(total))
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
