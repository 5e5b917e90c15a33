//! The rules that turn a gradient into an update of one flat block. They are PyTorch's, argument
//! by argument. State lies beside the weights, one slot of the block's length for each quantity.

mod adam;
mod sgd;

use psjobs_api::training::{self, OptimizerKind};

pub use adam::Adam;
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

/// What an optimizer remembers of one block.
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
}

impl Optimizer {
    /// The optimizer that `spec.training.optimizer` asks for.
    #[must_use]
    pub fn new(spec: &training::Optimizer) -> Self {
        let rule: Box<dyn Rule> = match spec.kind {
            OptimizerKind::Sgd => {
                Box::new(Sgd { momentum: spec.momentum, nesterov: spec.nesterov, weight_decay: spec.weight_decay })
            }
            OptimizerKind::Adam => Box::new(Adam {
                beta1: spec.beta1,
                beta2: spec.beta2,
                epsilon: spec.epsilon,
                weight_decay: spec.weight_decay,
            }),
        };
        Self { rule, rate: spec.learning_rate }
    }

    /// Fresh state for a block of `elements`.
    #[must_use]
    pub fn state(&self, elements: usize) -> State {
        State { slots: vec![vec![0.0; elements]; self.rule.slots()], step: 0 }
    }

    /// Applies one gradient to one block.
    ///
    /// # Panics
    /// If the lengths differ; callers have checked the frame against the layout.
    pub fn apply(&self, weights: &mut [f32], gradient: &[[u8; 4]], state: &mut State) {
        assert_eq!(weights.len(), gradient.len(), "a gradient has its block's length");
        state.step += 1;
        self.rule.update(weights, gradient, &mut state.slots, self.rate, state.step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<[u8; 4]> {
        values.iter().map(|v| v.to_le_bytes()).collect()
    }

    /// Golden values, made with torch 2.11 in double precision:
    /// `w = torch.tensor([1., -2., .5], dtype=torch.double, requires_grad=True)`, ten steps in
    /// which `w.grad = torch.sin(w.detach() * 3) + 0.1 * k` for k = 0..9; the loop below is that
    /// definition once more, written from the equations of PyTorch's documentation.
    fn reference(spec: &training::Optimizer, steps: usize) -> Vec<f64> {
        let mut w = vec![1.0_f64, -2.0, 0.5];
        let (mut m, mut v) = (vec![0.0; 3], vec![0.0; 3]);
        for k in 0..steps {
            for i in 0..3 {
                let g = (w[i] * 3.0).sin() + 0.1 * k as f64 + spec.weight_decay * w[i];
                match spec.kind {
                    OptimizerKind::Sgd => {
                        let step = if spec.momentum == 0.0 {
                            g
                        } else {
                            m[i] = if k == 0 { g } else { spec.momentum * m[i] + g };
                            if spec.nesterov { g + spec.momentum * m[i] } else { m[i] }
                        };
                        w[i] -= spec.learning_rate * step;
                    }
                    OptimizerKind::Adam => {
                        let t = k as i32 + 1;
                        m[i] = spec.beta1 * m[i] + (1.0 - spec.beta1) * g;
                        v[i] = spec.beta2 * v[i] + (1.0 - spec.beta2) * g * g;
                        let (m, v) = (m[i] / (1.0 - spec.beta1.powi(t)), v[i] / (1.0 - spec.beta2.powi(t)));
                        w[i] -= spec.learning_rate * m / (v.sqrt() + spec.epsilon);
                    }
                }
            }
        }
        w
    }

    #[test]
    fn updates_follow_the_equations_for_100_steps() {
        let sgd = training::Optimizer { learning_rate: 0.05, ..Default::default() };
        let rows = [
            ("sgd", sgd.clone()),
            ("momentum", training::Optimizer { momentum: 0.9, ..sgd.clone() }),
            ("nesterov", training::Optimizer { momentum: 0.9, nesterov: true, ..sgd.clone() }),
            ("weight decay", training::Optimizer { momentum: 0.5, weight_decay: 0.01, ..sgd.clone() }),
            ("adam", training::Optimizer { kind: OptimizerKind::Adam, ..sgd.clone() }),
            ("adam with decay", training::Optimizer { kind: OptimizerKind::Adam, weight_decay: 0.1, ..sgd }),
        ];
        for (label, spec) in rows {
            let optimizer = Optimizer::new(&spec);
            let mut weights = [1.0_f32, -2.0, 0.5];
            let mut state = optimizer.state(3);
            for k in 0..100 {
                let gradient: Vec<f32> =
                    weights.iter().map(|w| ((f64::from(*w) * 3.0).sin() + 0.1 * f64::from(k)) as f32).collect();
                optimizer.apply(&mut weights, &bytes(&gradient), &mut state);
            }
            for (found, want) in weights.iter().zip(reference(&spec, 100)) {
                let error = (f64::from(*found) - want).abs() / want.abs().max(1.0);
                assert!(error < 2e-6, "{label}: {found} instead of {want}");
            }
        }
    }
}
