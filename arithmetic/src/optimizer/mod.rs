//! The rules that turn a gradient into an update of one flat block. They are PyTorch's, argument
//! by argument. State lies beside the weights, one slot of the block's length for each quantity.

mod adagrad;
mod adam;
mod ftrl;
mod rmsprop;
mod sgd;

use std::ops::Range;

use psjobs_api::training::{self, OptimizerKind};

use crate::parameter_group::{ParameterGroup, Stretch};

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use ftrl::Ftrl;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;

/// An update rule over flat f32 blocks.
pub trait Rule: Send + Sync {
    /// Slots of state that the rule keeps for each element.
    fn slots(&self) -> usize;

    /// One step. `weights`, `gradient` (little-endian f32) and every slot have the same length.
    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step);
}

/// The arguments of one update.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Counts the updates of these weights, from 1.
    pub number: u64,
    /// Learning rate of this step.
    pub rate: f64,
    /// L2 penalty, or AdamW's decay.
    pub weight_decay: f64,
}

/// Slots that a rule keeps at most.
const MOST_SLOTS: usize = 3;

/// A job's optimizer: the rule, and what parameter groups may change of it.
pub struct Optimizer {
    rule: Box<dyn Rule>,
    kind: OptimizerKind,
    rate: f64,
    /// Replaced by that of a parameter group; `None` if nothing decays here.
    weight_decay: Option<f64>,
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

    /// Begins the next step, whose gradient then comes in parts.
    pub fn begin_step(&mut self) {
        self.step += 1;
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
            decoupled,
            amsgrad: spec.amsgrad,
        };
        let rule: Box<dyn Rule> = match spec.kind {
            OptimizerKind::Sgd => Box::new(Sgd { momentum: spec.momentum, nesterov: spec.nesterov }),
            OptimizerKind::Adam => Box::new(adam(false)),
            OptimizerKind::AdamW => Box::new(adam(true)),
            OptimizerKind::Adagrad => Box::new(Adagrad {
                learning_rate_decay: spec.learning_rate_decay,
                initial_accumulator: spec.initial_accumulator,
                epsilon: spec.epsilon,
            }),
            OptimizerKind::RmsProp => Box::new(RmsProp {
                alpha: spec.alpha,
                epsilon: spec.epsilon,
                momentum: spec.momentum,
                centered: spec.centered,
            }),
            OptimizerKind::Ftrl => Box::new(Ftrl { beta: spec.beta, l1: spec.l1, l2: spec.l2 }),
        };
        Self { rule, kind: spec.kind, rate: spec.learning_rate, weight_decay: Some(spec.weight_decay) }
    }

    /// The optimizer that subtracts gradients times the learning rate, where trainers have added weight decay and momentum to
    /// them ([`crate::momentum`]). Of parameter groups it takes the learning rate.
    #[must_use]
    pub fn descent(spec: &training::Optimizer) -> Self {
        let rule = Box::new(Sgd { momentum: 0.0, nesterov: false });
        Self { rule, kind: OptimizerKind::Sgd, rate: spec.learning_rate, weight_decay: None }
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

    /// Checks that the rule has what the parameter group of the tensor `name` changes.
    ///
    /// # Errors
    /// If it has not, or a number is out of range. The text names the tensor.
    pub fn check(&self, name: &str, group: &ParameterGroup) -> Result<(), String> {
        let ParameterGroup { learning_rate_factor, weight_decay } = group;
        let is_rate = |value: f64| (0.0..=1e6).contains(&value);
        if !is_rate(*learning_rate_factor) || !weight_decay.is_none_or(is_rate) {
            let decay = weight_decay.map_or_else(String::new, |decay| format!(" and a weight decay of {decay}"));
            return Err(format!(
                "the parameter group of {name} has a learning-rate factor of {learning_rate_factor}{decay}; both are \
                 numbers from 0 to 1000000"
            ));
        }
        if self.kind == OptimizerKind::Ftrl && weight_decay.is_some_and(|decay| decay != 0.0) {
            return Err(format!("FTRL has no weight decay, which the parameter group of {name} sets; leave it out"));
        }
        Ok(())
    }

    /// Applies one gradient to weights without parameter groups, at the job's learning rate times `factor`.
    ///
    /// # Panics
    /// As [`Optimizer::apply_by_group`].
    pub fn apply(&self, weights: &mut [f32], gradient: &[[u8; 4]], state: &mut State, factor: f64) {
        let all = Stretch { range: 0..weights.len(), group: ParameterGroup::default() };
        self.apply_by_group(weights, gradient, state, factor, &[all]);
    }

    /// Applies one gradient to one block, whose `stretches` follow each other without gaps, at the job's learning rate times
    /// `factor` times that of the parameter group.
    ///
    /// # Panics
    /// If the lengths differ; callers have checked the frame against the layout.
    pub fn apply_by_group(
        &self,
        weights: &mut [f32],
        gradient: &[[u8; 4]],
        state: &mut State,
        factor: f64,
        stretches: &[Stretch],
    ) {
        assert_eq!(weights.len(), gradient.len(), "a gradient has its block's length");
        self.begin(weights, state, factor, stretches).apply(0, gradient);
    }

    /// Begins what [`Optimizer::apply_by_group`] does, with a gradient that comes in parts.
    #[must_use]
    pub fn begin<'a>(
        &'a self,
        weights: &'a mut [f32],
        state: &'a mut State,
        factor: f64,
        stretches: &'a [Stretch],
    ) -> Update<'a> {
        state.begin_step();
        Update { optimizer: self, weights, state, factor, stretches }
    }

    /// Applies the gradient of the elements at `range` of a block to their weights, in the step that [`State::begin_step`] has
    /// begun.
    ///
    /// # Panics
    /// If the state has no such elements.
    pub fn apply_part(
        &self,
        range: &Range<usize>,
        weights: &mut [f32],
        gradient: &[[u8; 4]],
        state: &mut State,
        factor: (f64, &ParameterGroup),
    ) {
        let slots = state.slots.iter_mut().map(|slot| &mut slot[range.clone()]);
        self.update(weights, gradient, slots, factor, state.step);
    }

    /// As [`Optimizer::apply`], for weights of one group whose state lies elsewhere: one slice for each slot.
    pub fn update<'a>(
        &self,
        weights: &mut [f32],
        gradient: &[[u8; 4]],
        slots: impl Iterator<Item = &'a mut [f32]>,
        (factor, group): (f64, &ParameterGroup),
        number: u64,
    ) {
        let step = Step {
            number,
            rate: self.rate * factor * group.learning_rate_factor,
            weight_decay: self.weight_decay.map_or(0.0, |decay| group.weight_decay.unwrap_or(decay)),
        };
        let mut columns: [&mut [f32]; MOST_SLOTS] = Default::default();
        columns.iter_mut().zip(slots).for_each(|(column, slot)| *column = slot);
        self.rule.update(weights, gradient, &mut columns[..self.rule.slots()], &step);
    }
}

/// The update of one block by a gradient that comes in parts.
pub struct Update<'a> {
    optimizer: &'a Optimizer,
    weights: &'a mut [f32],
    state: &'a mut State,
    factor: f64,
    stretches: &'a [Stretch],
}

impl Update<'_> {
    /// Applies the part of the gradient that begins at element `start`. Each element is in one part.
    ///
    /// # Panics
    /// If it goes beyond the block.
    pub fn apply(&mut self, start: usize, gradient: &[[u8; 4]]) {
        let end = start + gradient.len();
        assert!(end <= self.weights.len(), "a gradient has its block's length");
        let first = self.stretches.partition_point(|stretch| stretch.range.end <= start);
        for Stretch { range, group } in self.stretches[first..].iter().take_while(|stretch| stretch.range.start < end) {
            let range = range.start.max(start)..range.end.min(end);
            let gradient = &gradient[range.start - start..range.end - start];
            let weights = &mut self.weights[range.clone()];
            self.optimizer.apply_part(&range, weights, gradient, self.state, (self.factor, group));
        }
    }
}

#[cfg(test)]
mod tests;
