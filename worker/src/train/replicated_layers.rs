//! The layers that every trainer has all of: each applies the same mean gradient by the same rule, so that
//! they stay the same everywhere. The rules are the servers'.

use std::collections::HashMap;
use std::ops::Range;

use psjobs_api::Training;
use psjobs_arithmetic::optimizer::{Optimizer, State};
use psjobs_arithmetic::parameter_group::Stretch;
use psjobs_ps::client::{Layers, TensorSpec};
use psjobs_ps::parameter_group::{in_groups, stretches};
use psjobs_ps::schedule::Schedule;
use tch::{Tensor, no_grad};

/// Parameters and their optimizer. The flat order is that of a backward pass: the last stage first.
pub struct ReplicatedLayers {
    parameters: Vec<(Tensor, Range<usize>)>,
    values: Vec<f32>,
    tensors: Vec<TensorSpec>,
    stretches: Vec<Stretch>,
    optimizer: Optimizer,
    schedule: Schedule,
    state: State,
    /// The first step whose gradient they do not contain.
    next_step: u64,
}

impl ReplicatedLayers {
    /// The parameters of a model's stages, the first stage first, under the names that `variables` give them.
    #[must_use]
    pub fn new(stages: &[Vec<Tensor>], variables: &HashMap<String, Tensor>, training: &Training) -> Self {
        let mut values = Vec::new();
        let mut parameters = Vec::new();
        for tensor in stages.iter().rev().flatten() {
            let start = values.len();
            values.resize(start + tensor.numel(), 0.0);
            tensor.copy_data(&mut values[start..], tensor.numel());
            parameters.push((tensor.shallow_clone(), start..values.len()));
        }
        let spec = |(tensor, _): &(Tensor, Range<usize>)| {
            let named = variables.iter().find(|(_, variable)| variable.data_ptr() == tensor.data_ptr());
            let name = named.map_or("", |(name, _)| name);
            TensorSpec::new(name, tensor.size().into_iter().map(|length| length as u64).collect())
        };
        let tensors = in_groups(parameters.iter().map(spec).collect(), &training.optimizer.groups);
        let optimizer = Optimizer::new(&training.optimizer);
        let state = optimizer.state(values.len());
        let (schedule, stretches) = (Schedule::from(&training.schedule), stretches(&tensors));
        Self { parameters, values, tensors, stretches, optimizer, schedule, state, next_step: 0 }
    }

    /// Elements of all parameters.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.values.len()
    }

    /// Updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.state.step()
    }

    /// The first step whose gradient they do not contain.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// The parameters in the flat order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// All of it, after so many steps.
    #[must_use]
    pub fn layers(&self, steps: u64) -> Layers {
        Layers { steps, updates: self.updates(), state: self.state() }
    }

    /// Parameters and optimizer state, flat, for a trainer that has lost them.
    #[must_use]
    pub fn state(&self) -> Vec<f32> {
        self.values.iter().chain(self.state.slots().iter().flatten()).copied().collect()
    }

    /// Numbers in [`ReplicatedLayers::state`].
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.values.len() * (1 + self.optimizer.slots())
    }

    /// Takes the state of another trainer that has done so many updates, the last one before `next_step`.
    ///
    /// # Panics
    /// If it has another length.
    pub fn take(&mut self, state: &[f32], updates: u64, next_step: u64) {
        assert_eq!(state.len(), self.state_len(), "the state of an equal model");
        let (values, slots) = state.split_at(self.values.len());
        self.values.copy_from_slice(values);
        let slots = slots.chunks_exact(self.values.len()).map(<[f32]>::to_vec).collect();
        self.state = State::restored(slots, updates);
        self.next_step = next_step;
        self.place();
    }

    /// One step, of this number, along the flat `gradient`. A step that the layers contain already changes nothing: it is
    /// done again only for its rows, when the ring broke after some trainers had updated and before all had.
    ///
    /// # Panics
    /// If the gradient has another length than the parameters.
    pub fn update(&mut self, step: u64, gradient: &[f32]) {
        if step < self.next_step {
            return;
        }
        self.next_step = step + 1;
        let factor = self.schedule.factor(step);
        let gradient = bytemuck::cast_slice(gradient);
        self.optimizer.apply_by_group(&mut self.values, gradient, &mut self.state, factor, &self.stretches);
        self.place();
    }

    /// Gives the model its values.
    fn place(&mut self) {
        no_grad(|| {
            for (tensor, range) in &mut self.parameters {
                let value = Tensor::from_slice(&self.values[range.clone()]);
                tensor.copy_(&value.view_as(tensor));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn parameters_follow_the_flat_gradient_with_the_last_stage_first() {
        let ones = |size: i64| Tensor::ones([size], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (first, last) = (ones(2), ones(1));
        let mut training = Training::default();
        training.optimizer.learning_rate = 0.5;
        let mut dense = ReplicatedLayers::new(
            &[vec![first.shallow_clone()], vec![last.shallow_clone()]],
            &HashMap::new(),
            &training,
        );
        assert_eq!(dense.elements(), 3);
        dense.update(0, &[1.0, 2.0, 4.0]);
        let values = |tensor: &Tensor| Vec::<f32>::try_from(tensor.detach()).expect("f32");
        assert_eq!((values(&last), values(&first)), (vec![0.5], vec![0.0, -1.0]));
    }

    #[test]
    fn a_step_that_is_done_again_counts_once() {
        let one = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut dense = ReplicatedLayers::new(&[vec![one.shallow_clone()]], &HashMap::new(), &Training::default());
        dense.update(0, &[1.0]);
        let once = dense.state();
        dense.update(0, &[5.0]);
        assert_eq!((dense.state(), dense.updates(), dense.next_step()), (once.clone(), 1, 1));
        dense.update(1, &[5.0]);
        assert_ne!(dense.state(), once);
    }

    #[test]
    fn a_trainer_that_takes_anothers_state_goes_on_as_that_one() {
        let mut training = Training::default();
        training.optimizer.kind = psjobs_api::training::OptimizerKind::Adam;
        let fresh = || Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (one, other) = (fresh(), fresh());
        let mut first = ReplicatedLayers::new(&[vec![one.shallow_clone()]], &HashMap::new(), &training);
        let mut second = ReplicatedLayers::new(&[vec![other.shallow_clone()]], &HashMap::new(), &training);
        for step in 0..3 {
            first.update(step, &[1.0, -2.0, 0.5 * step as f32]);
        }
        second.take(&first.state(), first.updates(), first.next_step());
        for dense in [&mut first, &mut second] {
            dense.update(3, &[0.1, 0.2, 0.3]);
        }
        assert!(first.state() == second.state() && first.updates() == second.updates());
        assert!(one.detach().equal(&other.detach()), "the models have them, too");
    }
}
