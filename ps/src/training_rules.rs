//! The rules of a job's training, converted from `spec.training` once for all blocks.

use psjobs_api::Training;
use psjobs_api::training::{self, Consistency, ConsistencyMode, NonFinite, StalenessPolicy};
use psjobs_arithmetic::codec::Codec;
use psjobs_arithmetic::optimizer::Optimizer;

use crate::consistency::Rule;
use crate::layout::Layout;
use crate::proto;
use crate::schedule::Schedule;
use crate::staleness::Damping;
use crate::wire::Buffers;

/// Blocks of models up to this many elements (64 MiB) keep their previous values unless the job says otherwise: a larger
/// one would notice the memory and the time.
const EXACT_BY_DEFAULT: usize = 16 << 20;

/// The effect of staleness where each trainer has its own momentum. Of 4, 8, 16 and 32 trainers all train with it
/// (`psjobs compare trainers`); with the root of the staleness one job of five with 32 diverged.
const PER_TRAINER: Damping = Damping::Damped { coefficient: 0.25 };

/// How gradients change parameters. Shared by all blocks and tables of a server.
pub struct TrainingRules {
    /// When gradients take effect.
    pub consistency: Consistency,
    /// How gradients change the values of blocks.
    pub optimizer: Optimizer,
    /// How they change the rows of sparse tables.
    pub rows_optimizer: Optimizer,
    /// The part of the optimizer that trainers carry out themselves, if any.
    pub trainer_momentum: Option<proto::TrainerMomentum>,
    /// How gradients with NaN or infinity are treated.
    pub non_finite: NonFinite,
    /// The codec of parameters sent to trainers.
    pub parameters: Codec,
    /// Trainers that had finished before this server started: no round waits for them.
    pub finished: Vec<u32>,
    /// Reusable memory for frames and sums.
    pub buffers: Buffers,
    schedule: Schedule,
    /// The effect of staleness on dense parameters.
    damping: Damping,
    /// Its effect on the rows of sparse tables.
    rows_damping: Damping,
}

impl TrainingRules {
    /// Converts `training`, for a job of `trainers` trainers of which those in `finished` have finished.
    #[must_use]
    pub fn new(training: &Training, trainers: u32, finished: &[u32]) -> Self {
        // Trainers that make steps alone apply the optimizer, its schedule and parameter groups themselves.
        let (optimizer, schedule) = match &training.local {
            Some(local) => (outer_optimizer(local, training.consistency.mode), Schedule::CONSTANT),
            None => (training.optimizer.clone(), Schedule::from(&training.schedule)),
        };
        let per_trainer = training.has_momentum_per_trainer();
        let training::Optimizer { momentum, weight_decay, .. } = optimizer;
        let default = if per_trainer { PER_TRAINER } else { Damping::Inverse };
        Self {
            consistency: training.consistency.clone(),
            optimizer: if per_trainer { Optimizer::descent(&optimizer) } else { Optimizer::new(&optimizer) },
            rows_optimizer: Optimizer::new(&optimizer),
            trainer_momentum: per_trainer.then_some(proto::TrainerMomentum { momentum, weight_decay }),
            non_finite: training.non_finite,
            parameters: Codec::of_parameters(training.compression.codec),
            finished: finished.to_vec(),
            buffers: Buffers::for_trainers(trainers),
            schedule,
            damping: damping(&training.staleness, default),
            rows_damping: damping(&training.staleness, Damping::None),
        }
    }

    /// Returns the rule of a new block or table of a job of `trainers` trainers.
    #[must_use]
    pub fn rule(&self, trainers: u32, elastic: bool) -> Rule {
        let consistency = self.consistency.clone();
        let mut rule = if elastic { Rule::elastic(consistency) } else { Rule::new(consistency, trainers) };
        self.finished.iter().for_each(|trainer| rule.finish(*trainer));
        rule
    }

    /// Returns whether blocks keep their values from before the last update. A trainer that dies in the middle of a step has
    /// given some blocks its gradient and not the others; from the previous values of the former its successor computes
    /// the same gradient once more. Only in Sync, where a step has one result, and where there is more than one block.
    #[must_use]
    pub fn keeps_previous(&self, elastic: bool, layout: &Layout) -> bool {
        let Consistency { mode, backup_trainers, exact_recovery, .. } = self.consistency;
        let has_one_result = mode == ConsistencyMode::Sync && backup_trainers == 0 && !elastic;
        has_one_result && layout.blocks() > 1 && exact_recovery.unwrap_or(layout.elements() <= EXACT_BY_DEFAULT)
    }

    /// Returns the factor on the learning rate of dense parameters for a gradient of `step` with `staleness`.
    #[must_use]
    pub fn factor(&self, step: u64, staleness: u64) -> f64 {
        self.schedule.factor(step) * self.damping.factor(staleness)
    }

    /// As [`TrainingRules::factor`], for rows of sparse tables.
    #[must_use]
    pub fn rows_factor(&self, step: u64, staleness: u64) -> f64 {
        self.schedule.factor(step) * self.rows_damping.factor(staleness)
    }
}

/// Returns the rule by which servers apply the mean difference of trainers that make steps alone (DiLoCo).
fn outer_optimizer(local: &training::Local, mode: ConsistencyMode) -> training::Optimizer {
    let (learning_rate, momentum) = (local.learning_rate, local.momentum(mode));
    training::Optimizer { learning_rate, momentum, nesterov: momentum > 0.0, ..training::Optimizer::default() }
}

/// Returns the effect that the job wants, or that of `default`.
fn damping(spec: &training::Staleness, default: Damping) -> Damping {
    match spec.policy {
        None => default,
        Some(StalenessPolicy::None) => Damping::None,
        Some(StalenessPolicy::Damped) => Damping::Damped { coefficient: spec.coefficient },
        Some(StalenessPolicy::Inverse) => Damping::Inverse,
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::training::{OptimizerKind, Staleness, StalenessMomentum};

    use super::*;

    #[test]
    fn stale_gradients_of_dense_parameters_count_less_unless_the_job_says_otherwise() {
        let rows = [
            (None, 0.25, 1.0),
            (Some(StalenessPolicy::None), 1.0, 1.0),
            (Some(StalenessPolicy::Inverse), 0.25, 0.25),
            (Some(StalenessPolicy::Damped), 0.5, 0.5),
        ];
        for (policy, dense, of_rows) in rows {
            let staleness = Staleness { policy, coefficient: 0.25, momentum: None };
            let rules = TrainingRules::new(&Training { staleness, ..Training::default() }, 4, &[]);
            assert_eq!((rules.factor(0, 4), rules.rows_factor(0, 4)), (dense, of_rows), "{policy:?}");
            // In Sync nothing is stale.
            assert_eq!((rules.factor(0, 0), rules.rows_factor(0, 0)), (1.0, 1.0), "{policy:?}");
        }
    }

    #[test]
    fn a_momentum_is_each_trainers_own_where_steps_are_stale_unless_the_job_says_otherwise() {
        use ConsistencyMode::{Async, Bounded, Sync};
        use OptimizerKind::{RmsProp, Sgd};
        let shared = Some(StalenessMomentum::Shared);
        let rows = [
            (Async, Sgd, 0.9, None, true),
            (Bounded, Sgd, 0.9, None, true),
            (Async, Sgd, 0.9, shared, false),
            (Async, Sgd, 0.0, None, false),
            (Async, RmsProp, 0.9, None, false),
            (Sync, Sgd, 0.9, None, false),
        ];
        for (mode, kind, momentum, place, per_trainer) in rows {
            let mut training = Training::default();
            (training.consistency.mode, training.staleness.momentum) = (mode, place);
            (training.optimizer.kind, training.optimizer.momentum) = (kind, momentum);
            let rules = TrainingRules::new(&training, 4, &[]);
            let sent = rules.trainer_momentum.map(|rule| rule.momentum);
            assert_eq!(sent, per_trainer.then_some(momentum), "{mode:?} {kind:?} {momentum} {place:?}");
            // Rows have their momentum at the servers.
            let slots = (rules.optimizer.slots() == 0, rules.rows_optimizer.slots() == 0);
            assert_eq!(slots, (per_trainer || momentum == 0.0, momentum == 0.0), "{mode:?} {kind:?}");
            assert_eq!(rules.factor(0, 16), if per_trainer { 0.2 } else { 1.0 / 16.0 }, "{mode:?} {kind:?}");
        }
    }
}
