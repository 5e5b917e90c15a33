//! Predicting clicks with tables too large for one trainer: the categories' vectors are rows of a sparse
//! table on the servers, the dense layers are every trainer's own and follow the mean of the gradients
//! that all-reduce gives. Both travel while the backward pass goes on.

mod error;
mod ring_rendezvous;
mod rows;
mod settings;
mod trainer;

use psjobs_api::{Environment, ReplicaResult};
use psjobs_rpc::Registry;
use psjobs_worker::data::Dataset as _;
use psjobs_worker::data::sampler::Split;
use psjobs_worker::train::chain;
use psjobs_worker::train::modules::Participant;

use crate::allreduce::{Inbox, Place};
use crate::data::clicks::Clicks;
pub use error::RecsysError;
use ring_rendezvous::{Others, RingRendezvous};
pub use settings::Settings;
use trainer::Trainer;

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
    let mut registry = Registry::default();
    let ring = environment.filter(|job| job.trainers > 1);
    let inbox = ring.map(|job| Inbox::offer(&mut registry, Place { rank: job.index, size: job.trainers }));
    let join = |environment| {
        let joined = Participant::join_streaming(environment, registry, layers, total, settings.connect_timeout);
        joined.map_err(RecsysError::Join)
    };
    let participant = environment.map(join).transpose()?;
    let outcome: Result<_, RecsysError> = (|| {
        let find = |((environment, participant), inbox)| Others::find(environment, participant, inbox);
        let meeting = RingRendezvous {
            others: ring.zip(participant.as_ref()).zip(inbox).map(find).transpose()?,
            total,
            interrupt: &settings.interrupt,
            connect_timeout: settings.connect_timeout,
        };
        let job = environment.zip(participant.as_ref());
        let mut trainer = Trainer::begin(job, meeting, settings, (model, dense))?;
        ready();
        let mut result = trainer.train(clicks, split, total, stop)?;
        if let Some(result) = result.as_mut().filter(|_| plan.trainer == 0) {
            result.metrics.extend(trainer.evaluate(held_out).map_err(RecsysError::Evaluate)?);
        }
        trainer.leave(result.is_some());
        Ok(result)
    })();
    match (outcome, participant) {
        (Ok(result), Some(participant)) => {
            participant.leave(result.as_ref()).map_err(RecsysError::Leave)?;
            Ok(result)
        }
        (Err(error), Some(participant)) if error.is_own() => {
            participant.fail(chain(&error));
            Err(error)
        }
        (outcome, _) => outcome,
    }
}
