//! How a job trains, as its blocks need it: `spec.training` read once.

use psjobs_api::Training;
use psjobs_api::training::{self, Consistency, NonFinite, StalenessPolicy};

use crate::codec::Codec;
use crate::optimizer::Optimizer;
use crate::schedule::Schedule;
use crate::staleness::Damping;
use crate::wire::Buffers;

/// Shared by all blocks of a server.
pub struct Recipe {
    /// When gradients take effect.
    pub consistency: Consistency,
    /// How they do.
    pub optimizer: Optimizer,
    /// What happens to one that is not finite.
    pub non_finite: NonFinite,
    /// How parameters travel back.
    pub parameters: Codec,
    /// Memory for what travels and for sums.
    pub buffers: Buffers,
    schedule: Schedule,
    damping: Damping,
}

impl Recipe {
    /// The recipe that `training` asks for, in a job of so many trainers.
    #[must_use]
    pub fn new(training: &Training, trainers: u32) -> Self {
        Self {
            consistency: training.consistency.clone(),
            optimizer: Optimizer::new(&training.optimizer),
            non_finite: training.non_finite,
            parameters: Codec::of_parameters(training.compression.codec),
            buffers: Buffers::for_trainers(trainers),
            schedule: Schedule::from(&training.schedule),
            damping: damping(&training.staleness),
        }
    }

    /// Factor on the learning rate for a gradient of a trainer's `step`.
    #[must_use]
    pub fn factor(&self, step: u64, staleness: u64) -> f64 {
        self.schedule.factor(step) * self.damping.factor(staleness)
    }
}

fn damping(spec: &training::Staleness) -> Damping {
    match spec.policy {
        StalenessPolicy::None => Damping::None,
        StalenessPolicy::Damped => Damping::Damped { coefficient: spec.coefficient },
        StalenessPolicy::Inverse => Damping::Inverse,
    }
}
