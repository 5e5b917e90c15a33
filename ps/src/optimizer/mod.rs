//! The rules that turn a gradient into an update of one flat block. They are PyTorch's, argument
//! by argument. State lies beside the weights, one slot of the block's length for each quantity.

mod adagrad;
mod adam;
mod ftrl;
mod rmsprop;
mod sgd;

use psjobs_api::training::{self, OptimizerKind};

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use ftrl::Ftrl;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;

/// An update rule over flat f32 blocks.
pub trait Rule: Send + Sync {
    /// Slots of state that the rule keeps for each element.
    fn slots(&self) -> usize;

    /// One step. `weights`, `gradient` (little-endian f32) and every slot have the length of the
    /// block; `step` counts this block's updates from 1; `rate` is this step's learning rate.
    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [Vec<f32>], rate: f64, step: u64);
}

/// A job's optimizer: the rule and its learning rate.
pub struct Optimizer {
    rule: Box<dyn Rule>,
    rate: f64,
}

/// The state of an optimizer for one block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    slots: Vec<Vec<f32>>,
    step: u64,
}

impl State {
    /// Updates done so far.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The slots, each of the block's length.
    #[must_use]
    pub fn slots(&self) -> &[Vec<f32>] {
        &self.slots
    }

    /// Restores the state from a checkpoint.
    #[must_use]
    pub fn restored(slots: Vec<Vec<f32>>, step: u64) -> Self {
        Self { slots, step }
    }
}

impl Optimizer {
    /// The optimizer that `spec.training.optimizer` asks for.
    #[must_use]
    pub fn new(spec: &training::Optimizer) -> Self {
        let adam = |decoupled| Adam {
            beta1: spec.beta1,
            beta2: spec.beta2,
            epsilon: spec.epsilon,
            weight_decay: spec.weight_decay,
            decoupled,
            amsgrad: spec.amsgrad,
        };
        let rule: Box<dyn Rule> = match spec.kind {
            OptimizerKind::Sgd => {
                Box::new(Sgd { momentum: spec.momentum, nesterov: spec.nesterov, weight_decay: spec.weight_decay })
            }
            OptimizerKind::Adam => Box::new(adam(false)),
            OptimizerKind::AdamW => Box::new(adam(true)),
            OptimizerKind::Adagrad => Box::new(Adagrad {
                learning_rate_decay: spec.learning_rate_decay,
                weight_decay: spec.weight_decay,
                initial_accumulator: spec.initial_accumulator,
                epsilon: spec.epsilon,
            }),
            OptimizerKind::RmsProp => Box::new(RmsProp {
                alpha: spec.alpha,
                epsilon: spec.epsilon,
                weight_decay: spec.weight_decay,
                momentum: spec.momentum,
                centered: spec.centered,
            }),
            OptimizerKind::Ftrl => Box::new(Ftrl { beta: spec.beta, l1: spec.l1, l2: spec.l2 }),
        };
        Self { rule, rate: spec.learning_rate }
    }

    /// Slots of state for each element.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.rule.slots()
    }

    /// Fresh state for a block of `elements`.
    #[must_use]
    pub fn state(&self, elements: usize) -> State {
        State { slots: vec![vec![0.0; elements]; self.rule.slots()], step: 0 }
    }

    /// Applies one gradient to one block, at the job's learning rate times `factor`.
    ///
    /// # Panics
    /// If the lengths differ; callers have checked the frame against the layout.
    pub fn apply(&self, weights: &mut [f32], gradient: &[[u8; 4]], state: &mut State, factor: f64) {
        assert_eq!(weights.len(), gradient.len(), "a gradient has its block's length");
        state.step += 1;
        self.update(weights, gradient, &mut state.slots, factor, state.step);
    }

    /// As [`Optimizer::apply`], for a row of a table, whose state lies elsewhere.
    pub(crate) fn update(
        &self,
        weights: &mut [f32],
        gradient: &[[u8; 4]],
        slots: &mut [Vec<f32>],
        factor: f64,
        step: u64,
    ) {
        self.rule.update(weights, gradient, slots, self.rate * factor, step);
    }
}

#[cfg(test)]
mod tests;
