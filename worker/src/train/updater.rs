//! The interface of the training loop to where the parameters are.

use std::time::Duration;

use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::{ClientError, TimeSpent};
use tch::{TchError, Tensor};

use super::plan::Turn;
use crate::workload::Metrics;

/// The parameters could not be updated.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error(transparent)]
    Servers(#[from] ClientError),
    #[error(transparent)]
    Libtorch(#[from] TchError),
}

/// Where the parameters are kept and updated.
pub trait Updater {
    /// The first step to do.
    fn next_step(&self) -> u64;

    /// Computes the gradient of `loss`, that of a micro-batch, and keeps it: the next [`Updater::update`] adds it to its own.
    ///
    /// # Errors
    /// If libtorch cannot compute it.
    fn accumulate(&mut self, loss: &Tensor) -> Result<(), UpdateError>;

    /// Updates the model's parameters by the gradient of `loss`, that of the batch of `turn` or of its last micro-batch; the next
    /// step to do, which is an earlier one if the servers had to go back to a checkpoint. Where exchanges overlap, the update may
    /// be under way when this returns.
    ///
    /// # Errors
    /// If the servers cannot be reached or refuse.
    fn update(&mut self, turn: Turn, loss: &Tensor) -> Result<u64, UpdateError>;

    /// Ends the update under way, if one is, when no step is left to do: the model has all updates then. Returns the next step
    /// if there is one all the same, because the servers had to go back to a checkpoint.
    ///
    /// # Errors
    /// If the servers cannot be reached or refuse, or the wait is interrupted.
    fn settle(&mut self) -> Result<Option<u64>, UpdateError>;

    /// This trainer's share of the examples of `step` and some that follow, if they would read `base` of them on
    /// average and it has done `work` so far. `None` if no server reports it now.
    ///
    /// # Errors
    /// If the job's shares are fixed.
    fn share(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, UpdateError>;

    /// The next batch to read, of an elastic job, or with local steps the next batches up to an exchange
    /// ([`Plan::batches_of`](super::Plan)); `None` if none is left for now, and all is done if nothing that was
    /// given is still to be done.
    ///
    /// # Errors
    /// If the servers cannot be reached or refuse, or the wait is interrupted.
    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError>;

    /// Counts the times that an elastic job was entered: batches from before the last time are not to be read.
    fn entries(&self) -> u64;

    /// Reports how far this trainer is, and where its time has gone.
    fn report(&mut self, examples: u64, metrics: &Metrics, spent: TimeSpent);

    /// Records values of metrics when `step` steps are done, for the series of the job.
    fn record(&mut self, step: u64, metrics: &Metrics);

    /// Time spent in [`Updater::update`] waiting for others.
    fn waiting(&self) -> Duration;

    /// The last words: whether all steps are done, examples read, final metrics.
    ///
    /// # Errors
    /// If the servers cannot be notified.
    fn leave(self, finished: bool, examples: u64, metrics: &Metrics) -> Result<(), UpdateError>;

    /// The last words of a trainer that ends with an error of its own, which `failure` describes.
    fn fail(self, failure: String);
}
