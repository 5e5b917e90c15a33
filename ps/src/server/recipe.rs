//! How a job trains, as its blocks need it: `spec.training` read once.

use psjobs_api::Training;
use psjobs_api::training::{self, Consistency, NonFinite, ScheduleKind, StalenessPolicy};

use crate::codec::Codec;
use crate::optimizer::Optimizer;
use crate::schedule::{Schedule, Shape};
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
    /// The recipe that `training` asks for.
    #[must_use]
    pub fn new(training: &Training) -> Self {
        Self {
            consistency: training.consistency.clone(),
            optimizer: Optimizer::new(&training.optimizer),
            non_finite: training.non_finite,
            parameters: Codec::of_parameters(training.compression.codec),
            buffers: Buffers::default(),
            schedule: schedule(&training.schedule),
            damping: damping(&training.staleness),
        }
    }

    /// Factor on the learning rate for a gradient of a trainer's `step`.
    #[must_use]
    pub fn factor(&self, step: u64, staleness: u64) -> f64 {
        self.schedule.factor(step) * self.damping.factor(staleness)
    }
}

fn schedule(spec: &training::Schedule) -> Schedule {
    let (total, end) = (spec.total_steps, spec.end);
    let shape = match spec.kind {
        ScheduleKind::Constant => Shape::Constant,
        ScheduleKind::Step => Shape::Step { size: spec.step_size, gamma: spec.gamma },
        ScheduleKind::Linear => Shape::Linear { total, end },
        ScheduleKind::Cosine => Shape::Cosine { total, end },
    };
    Schedule { warmup: spec.warmup_steps, shape }
}

fn damping(spec: &training::Staleness) -> Damping {
    match spec.policy {
        StalenessPolicy::None => Damping::None,
        StalenessPolicy::Damped => Damping::Damped { coefficient: spec.coefficient },
        StalenessPolicy::Inverse => Damping::Inverse,
    }
}
