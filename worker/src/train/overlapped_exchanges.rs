//! Exchanges that overlap (`spec.training.consistency.overlap`): a trainer gives its gradient to the servers, and computes the
//! next one with the parameters that it has while they apply it.

use psjobs_ps::client::{Ended, Session};
use tch::{TchError, Tensor};

use super::UpdateError;
use super::parameter_buffer::ParameterBuffer;
use super::plan::Turn;

/// The model of a trainer that computes while its last exchange is under way, in memory of its own.
#[derive(Debug)]
pub struct OverlappedExchanges {
    buffer: ParameterBuffer,
}

impl OverlappedExchanges {
    /// The trainer whose model is in `buffer`, apart from the session's memory.
    pub fn new(buffer: ParameterBuffer) -> Self {
        Self { buffer }
    }

    /// Computes the gradient of `loss`, that of a micro-batch, which is added to that of the next [`OverlappedExchanges::update`].
    ///
    /// # Errors
    /// If libtorch cannot compute it.
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<(), TchError> {
        self.buffer.accumulate(loss)
    }

    /// Computes the gradient of `loss`, ends the exchange of the gradient before, and begins that of this one. The model has the
    /// parameters of the exchange that has ended then. Returns the next step: an earlier one if the servers had to go back to a
    /// checkpoint. What was computed meanwhile is dropped then.
    ///
    /// # Errors
    /// If libtorch cannot compute the gradient, or the servers cannot be reached or refuse.
    pub fn update(&mut self, turn: Turn, loss: &Tensor, session: &mut Session) -> Result<u64, UpdateError> {
        let gradients = self.buffer.gradients(loss)?;
        if let Some(Ended { next, has_gone_back }) = session.end_exchange().transpose()? {
            self.buffer.take();
            if has_gone_back {
                return Ok(next);
            }
        }
        // Behind `take`: where the copy of the parameters to a device is only queued, that of the gradients waits for it.
        self.buffer.put(&gradients, |first| session.offer(turn.step, first));
        session.begin_exchange(turn.step);
        Ok(turn.step + 1)
    }

    /// Takes the parameters that arrived in the session's memory.
    pub fn take(&mut self) {
        self.buffer.take();
    }
}
