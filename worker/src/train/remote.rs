//! Training with the parameters on servers: gradients go up, parameters come back, in each step or after some steps that
//! the trainer makes alone.

use std::fmt;
use std::time::Duration;

use psjobs_api::Training;
use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::{Session, SessionConfig};
use tch::{Device, Tensor};

use super::flat::Flat;
use super::local_steps::LocalSteps;
use super::parameter_buffer::ParameterBuffer;
use super::plan::Turn;
use super::{UpdateError, Updater};
use crate::workload::Metrics;

/// A trainer's connection to its job.
pub struct Remote {
    /// Declared before `session`, and so dropped before it: it may have views of the session's memory.
    model: Model,
    session: Session,
}

/// The model's parameters between two exchanges.
#[derive(Debug)]
enum Model {
    /// The servers' own: every step is an exchange.
    Servers(ParameterBuffer),
    /// This trainer's: some steps are made alone.
    Own(Box<LocalSteps>),
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Remote {
    /// Joins the job that `config` names with a model whose parameters, on `device`, are `flat`.
    ///
    /// # Errors
    /// If a server cannot be reached, or refuses this trainer or its model.
    pub fn join(config: SessionConfig, flat: Flat, device: Device) -> Result<Self, UpdateError> {
        let session = Session::join(config, &flat.values())?;
        Ok(Self::exchanging_every_step(session, flat, device))
    }

    /// As [`Remote::join`], for a job that trains as `training` says and has `total` steps.
    ///
    /// # Errors
    /// As [`Remote::join`], and if libtorch refuses the optimizer of local steps.
    pub fn join_job(
        config: SessionConfig,
        flat: Flat,
        device: Device,
        training: &Training,
        total: u64,
    ) -> Result<Self, UpdateError> {
        let Some(settings) = &training.local else { return Self::join(config, flat, device) };
        let session = Session::join(config, &flat.values())?;
        let model = Model::Own(Box::new(LocalSteps::new(flat, training, settings, total, &session)?));
        Ok(Self { model, session })
    }

    #[allow(unsafe_code)]
    fn exchanging_every_step(session: Session, flat: Flat, device: Device) -> Self {
        // SAFETY: a session's memory never moves, and `leave` and the order of the fields of `Remote` drop the
        // buffer before the session. The session writes to it in `exchange` and `next_batch` only, when the loss
        // that was computed from the old parameters has given its gradients.
        let buffer = unsafe { ParameterBuffer::new(flat, device, session.parameters()) };
        Self { model: Model::Servers(buffer), session }
    }
}

impl Model {
    /// Takes the parameters that arrived in the session's memory.
    fn take(&mut self, parameters: &[f32]) {
        match self {
            Self::Servers(buffer) => buffer.take(parameters),
            Self::Own(local) => local.take(parameters),
        }
    }
}

impl Updater for Remote {
    fn next_step(&self) -> u64 {
        let next = self.session.next_step();
        match &self.model {
            Model::Servers(_) => next,
            Model::Own(local) => local.next_step(next),
        }
    }

    fn update(&mut self, turn: Turn, loss: &Tensor) -> Result<u64, UpdateError> {
        match &mut self.model {
            Model::Servers(buffer) => {
                buffer.put_gradients(loss, self.session.gradients_mut());
                let next = self.session.exchange(turn.step)?;
                buffer.take(self.session.parameters());
                Ok(next)
            }
            Model::Own(local) => local.update(turn, loss, &mut self.session),
        }
    }

    fn share(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, UpdateError> {
        Ok(self.session.share_batch(step, base, work)?)
    }

    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
        let (entries, batch) = (self.session.entries(), self.session.next_batch()?);
        if self.session.entries() != entries {
            self.model.take(self.session.parameters());
        }
        Ok(batch)
    }

    fn entries(&self) -> u64 {
        self.session.entries()
    }

    fn report(&mut self, examples: u64, metrics: &Metrics) {
        self.session.report(examples, metrics);
    }

    fn record(&mut self, step: u64, metrics: &Metrics) {
        self.session.recorder().record(step, metrics);
    }

    fn waiting(&self) -> Duration {
        self.session.waiting()
    }

    fn leave(self, finished: bool, examples: u64, metrics: &Metrics) -> Result<(), UpdateError> {
        let Self { model, session } = self;
        drop(model);
        Ok(session.leave(finished, examples, metrics.clone())?)
    }

    fn fail(self, failure: String) {
        let Self { model, session } = self;
        drop(model);
        session.fail(failure);
    }
}
