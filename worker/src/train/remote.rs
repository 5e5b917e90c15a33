//! Training with the parameters on servers: gradients go up, parameters come back, in each step or after some steps that
//! the trainer makes alone.

use std::fmt;
use std::time::Duration;

use psjobs_api::Training;
use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::{ClientError, Ended, Session, SessionConfig, TimeSpent};
use psjobs_ps::layout::Layout;
use tch::{Device, Tensor};

use super::flat::Flat;
use super::local_steps::LocalSteps;
use super::overlapped_exchanges::OverlappedExchanges;
use super::parameter_buffer::ParameterBuffer;
use super::plan::Turn;
use super::{UpdateError, Updater};
use crate::workload::Metrics;

/// A trainer's connection to its job.
pub struct Remote {
    model: Model,
    session: Session,
}

/// The model's parameters between two exchanges.
#[derive(Debug)]
enum Model {
    /// The servers' own: every step is an exchange.
    Servers(ParameterBuffer),
    /// A copy of the servers': every step is an exchange, and the next one is computed meanwhile.
    Copy(OverlappedExchanges),
    /// This trainer's: some steps are made alone.
    Own(Box<LocalSteps>),
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Remote {
    /// Joins the job that `config` names, which trains as `training` says and has `total` steps, with a model whose
    /// parameters, on `device`, are `flat`.
    ///
    /// # Errors
    /// If a server cannot be reached, or refuses this trainer or its model, and if libtorch refuses the optimizer of local
    /// steps.
    #[allow(unsafe_code)]
    pub fn join(
        config: SessionConfig,
        flat: Flat,
        device: Device,
        training: &Training,
        total: u64,
    ) -> Result<Self, UpdateError> {
        let elements = flat.elements();
        let layout = Layout::new(&config.tensors, config.servers.len()).map_err(ClientError::from)?;
        let session = Session::join(config, &flat.values())?;
        let model = match &training.local {
            Some(settings) => Model::Own(Box::new(LocalSteps::new(flat, training, settings, total, &session)?)),
            None if training.consistency.overlaps_exchanges() => {
                let memory = session.map_memory().map_err(|source| ClientError::Memory { elements, source })?;
                Model::Copy(OverlappedExchanges::new(ParameterBuffer::apart(flat, device, memory)))
            }
            None => {
                let memory = session.map_memory().map_err(|source| ClientError::Memory { elements, source })?;
                // SAFETY: what a step computes is gone when it ends. The session writes to the memory in `exchange` and
                // `next_batch`, when the loss that was computed from the old parameters has given its gradients; and, while it
                // gives them, to those parameters whose gradients were offered: backward() has read them. If the
                // servers go back meanwhile, it writes to all: then backward() may read old and new values, which are
                // floats like any, and what it computes is discarded, because the step is done again.
                Model::Servers(unsafe { ParameterBuffer::new(flat, device, memory, layout.block_elements()) })
            }
        };
        Ok(Self { model, session })
    }

    /// Lets gradients leave when backward() has ended, and not while it computes others. A model that reads a parameter
    /// behind `detach` may read its next value otherwise.
    #[must_use]
    pub fn without_overlap(mut self) -> Self {
        if let Model::Servers(buffer) = &mut self.model {
            buffer.offer_at_the_end();
        }
        self
    }
}

impl Model {
    /// Takes the parameters that arrived in the session's memory.
    fn take(&mut self, session: &Session) {
        match self {
            Self::Servers(buffer) => buffer.take(),
            Self::Copy(exchanges) => exchanges.take(),
            Self::Own(local) => local.take(session.parameters()),
        }
    }
}

impl Updater for Remote {
    fn next_step(&self) -> u64 {
        let next = self.session.next_step();
        match &self.model {
            Model::Servers(_) | Model::Copy(_) => next,
            Model::Own(local) => local.next_step(next),
        }
    }

    fn accumulate(&mut self, loss: &Tensor) -> Result<(), UpdateError> {
        match &mut self.model {
            Model::Servers(buffer) => buffer.accumulate(loss)?,
            Model::Copy(exchanges) => exchanges.accumulate(loss)?,
            Model::Own(local) => local.accumulate(loss)?,
        }
        Ok(())
    }

    fn update(&mut self, turn: Turn, loss: &Tensor) -> Result<u64, UpdateError> {
        match &mut self.model {
            Model::Servers(buffer) => {
                buffer.put_gradients(loss, |first| self.session.offer(turn.step, first))?;
                let next = self.session.exchange(turn.step)?;
                buffer.take();
                Ok(next)
            }
            Model::Copy(exchanges) => exchanges.update(turn, loss, &mut self.session),
            Model::Own(local) => local.update(turn, loss, &mut self.session),
        }
    }

    fn settle(&mut self) -> Result<Option<u64>, UpdateError> {
        let Some(Ended { has_gone_back, .. }) = self.session.settle().transpose()? else { return Ok(None) };
        self.model.take(&self.session);
        Ok(has_gone_back.then(|| self.next_step()))
    }

    fn share(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, UpdateError> {
        Ok(self.session.share_batch(step, base, work)?)
    }

    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
        let (entries, batch) = (self.session.entries(), self.session.next_batch()?);
        if self.session.entries() != entries {
            self.model.take(&self.session);
        }
        Ok(batch)
    }

    fn entries(&self) -> u64 {
        self.session.entries()
    }

    fn report(&mut self, examples: u64, metrics: &Metrics, spent: TimeSpent) {
        self.session.report(examples, metrics, Some(spent));
    }

    fn record(&mut self, step: u64, metrics: &Metrics) {
        self.session.record(step, metrics);
    }

    fn waiting(&self) -> Duration {
        self.session.waiting()
    }

    fn leave(self, finished: bool, examples: u64, metrics: &Metrics) -> Result<(), UpdateError> {
        Ok(self.session.leave(finished, examples, metrics.clone())?)
    }

    fn fail(self, failure: String) {
        self.session.fail(failure);
    }
}
