//! Predicting clicks with tables too large for one trainer: the categories' vectors are rows of a sparse
//! table on the servers, the dense layers are every trainer's own and follow the mean of the gradients
//! that all-reduce gives. Both travel while the backward pass goes on.

mod ring_rendezvous;
mod rows;
mod trainer;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_api::{Environment, ReplicaResult, Training};
use psjobs_ps::client::ClientError;
use psjobs_ps::sparse::{SpecError, TableSpec};
use psjobs_ps::tls::TlsError;

use crate::allreduce::RingError;
use crate::data::clicks::Clicks;
use psjobs_rpc::{Registry, RemoteError};
use psjobs_worker::data::Dataset as _;
use psjobs_worker::data::loader::LoaderEnded;
use psjobs_worker::data::sampler::{Split, TooFewExamples};
use psjobs_worker::train::Plan;
use psjobs_worker::train::modules::{ModulesError, Participant};
use ring_rendezvous::RingRendezvous;
use trainer::Trainer;

/// How it trains.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub table: TableSpec,
    /// Units of the lower and of the upper layers, without the vector and the score.
    pub layers: (Vec<i64>, Vec<i64>),
    pub training: Training,
    /// How long a server or another trainer may stay away.
    pub patience: Duration,
    /// Set to end whatever is waited for.
    pub interrupt: Arc<AtomicBool>,
}

/// Training failed.
#[derive(Debug, thiserror::Error)]
pub enum RecsysError {
    #[error(transparent)]
    TooFewExamples(#[from] TooFewExamples),
    #[error(transparent)]
    Table(#[from] SpecError),
    #[error("this trainer cannot begin")]
    Join(#[source] ModulesError),
    #[error("this trainer cannot begin")]
    Open(#[source] ClientError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("this trainer cannot tell the others where it is")]
    Publish(#[source] RemoteError),
    #[error("this trainer cannot meet the others")]
    Meet(#[source] RingError),
    #[error("this trainer cannot listen for the others")]
    Start(#[source] std::io::Error),
    #[error("this trainer cannot go on from where the servers are")]
    Follow(#[source] ClientError),
    #[error("this trainer has no data for step {step}")]
    Data { step: u64, source: LoaderEnded },
    #[error("this trainer cannot go on at step {step}")]
    Rows { step: u64, source: ClientError },
    #[error("this trainer cannot go on at step {step}")]
    Gradients { step: u64, source: RingError },
    #[error("the loss is {loss} at step {step}: training has diverged; lower the learning rate")]
    Diverged { step: u64, loss: f64 },
    #[error("the model is trained, but cannot be evaluated")]
    Evaluate(#[source] ClientError),
    #[error("this trainer is done, but cannot say so")]
    Leave(#[source] ModulesError),
}

impl RecsysError {
    /// Returns true if this trainer was asked to stop while it waited.
    fn is_interruption(&self) -> bool {
        matches!(self, Self::Meet(RingError::Interrupted) | Self::Follow(ClientError::Interrupted))
    }
}

/// Trains on `clicks` and tests on `held_out`; alone without `environment`. `ready` is called when the
/// first step is about to begin; `stop` is asked before each. `None` if it said so.
///
/// # Errors
/// See [`RecsysError`].
pub fn train(
    environment: Option<&Environment>,
    clicks: &Clicks,
    held_out: &Clicks,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, RecsysError> {
    let plan = &settings.plan;
    let split = Split { examples: clicks.examples(), batch: plan.batch, trainers: plan.trainers, seed: plan.seed };
    let total = plan.total_steps(split.steps_per_epoch()?);
    let (model, dense, layers) = trainer::build(clicks, settings);
    let join = |environment| {
        let joined = Participant::join(environment, Registry::default(), layers.clone(), total, settings.patience);
        joined.map_err(RecsysError::Join)
    };
    let participant = environment.map(join).transpose()?;
    let meeting = RingRendezvous {
        job: environment.zip(participant.as_ref()),
        interrupt: &settings.interrupt,
        patience: settings.patience,
    };
    let mut trainer = Trainer::begin(meeting, settings, (model, dense), layers, total)?;
    ready();
    let result = trainer.train(clicks, split, total, stop)?;
    let result = match result {
        Some(mut result) if plan.trainer == 0 => {
            result.metrics.extend(trainer.evaluate(held_out).map_err(RecsysError::Evaluate)?);
            Some(result)
        }
        other => other,
    };
    trainer.leave(result.is_some());
    if let Some(participant) = participant {
        participant.leave(result.as_ref()).map_err(RecsysError::Leave)?;
    }
    Ok(result)
}
