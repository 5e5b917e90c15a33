//! Training with the parameters on servers: gradients go up, parameters come back.

use std::fmt;
use std::time::Duration;

use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::{Session, SessionConfig};
use tch::{Device, Tensor};

use super::flat::Flat;
use super::parameter_buffer::ParameterBuffer;
use super::{UpdateError, Updater};
use crate::workload::Metrics;

/// A trainer's connection to its job.
pub struct Remote {
    /// Declared before `session`, and so dropped before it: it has views of the session's memory.
    buffer: ParameterBuffer,
    session: Session,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

impl Remote {
    /// Joins the job that `config` names with a model whose parameters, on `device`, are `flat`.
    ///
    /// # Errors
    /// If a server cannot be reached, or refuses this trainer or its model.
    #[allow(unsafe_code)]
    pub fn join(config: SessionConfig, flat: Flat, device: Device) -> Result<Self, UpdateError> {
        let session = Session::join(config, &flat.values())?;
        // SAFETY: a session's memory never moves, and `leave` and the order of the fields of `Remote` drop the
        // buffer before the session. The session writes to it in `exchange` and `next_batch` only, when the loss
        // that was computed from the old parameters has given its gradients.
        let buffer = unsafe { ParameterBuffer::new(flat, device, session.parameters()) };
        Ok(Self { buffer, session })
    }
}

impl Updater for Remote {
    fn next_step(&self) -> u64 {
        self.session.next_step()
    }

    fn update(&mut self, step: u64, loss: &Tensor) -> Result<u64, UpdateError> {
        self.buffer.put_gradients(loss, self.session.gradients_mut());
        let next = self.session.exchange(step)?;
        self.buffer.take(self.session.parameters());
        Ok(next)
    }

    fn share(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, UpdateError> {
        Ok(self.session.share_batch(step, base, work)?)
    }

    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
        let (entries, batch) = (self.session.entries(), self.session.next_batch()?);
        if self.session.entries() != entries {
            self.buffer.take(self.session.parameters());
        }
        Ok(batch)
    }

    fn entries(&self) -> u64 {
        self.session.entries()
    }

    fn report(&mut self, examples: u64, metrics: &Metrics) {
        self.session.report(examples, metrics);
    }

    fn waiting(&self) -> Duration {
        self.session.waiting()
    }

    fn leave(self, finished: bool, examples: u64, metrics: &Metrics) -> Result<(), UpdateError> {
        let Self { buffer, session } = self;
        drop(buffer);
        Ok(session.leave(finished, examples, metrics.clone())?)
    }

    fn fail(self, failure: String) {
        let Self { buffer, session } = self;
        drop(buffer);
        session.fail(failure);
    }
}
