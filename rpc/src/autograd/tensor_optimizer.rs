//! The servers' optimizers as operations on tensors, for parameters on a GPU: values, gradient and state stay on their device. The
//! formulas are those of `psjobs_arithmetic::optimizer`, operation by operation and rounded to f32 in the same places.

use psjobs_api::training::{Optimizer as Arguments, OptimizerKind};
use psjobs_arithmetic::optimizer::Optimizer;
use tch::Tensor;

/// An optimizer of a job, on tensors.
#[derive(Clone, Debug)]
pub struct TensorOptimizer {
    arguments: Arguments,
    slots: usize,
}

/// The state of an optimizer for one parameter, on the parameter's device.
#[derive(Debug)]
pub struct TensorState {
    /// Each has the parameter's shape.
    slots: Vec<Tensor>,
    /// Updates done so far.
    step: u64,
}

/// One update: the values before it, their gradient, and the state.
struct Update<'a> {
    arguments: &'a Arguments,
    weights: &'a Tensor,
    gradient: Tensor,
    slots: &'a mut [Tensor],
    number: u64,
}

impl TensorOptimizer {
    /// The optimizer that `spec.training.optimizer` asks for.
    #[must_use]
    pub fn new(arguments: &Arguments) -> Self {
        Self { arguments: arguments.clone(), slots: Optimizer::new(arguments).slots() }
    }

    /// Fresh state for a parameter.
    #[must_use]
    pub fn state(&self, parameter: &Tensor) -> TensorState {
        let slots = (0..self.slots).map(|_| parameter.detach().zeros_like()).collect();
        TensorState { slots, step: 0 }
    }

    /// Returns the next values of a parameter, which is not written.
    ///
    /// # Panics
    /// If the gradient has another shape, or the device has no memory left.
    pub fn apply(&self, parameter: &Tensor, gradient: &Tensor, state: &mut TensorState) -> Tensor {
        let TensorState { slots, step } = state;
        *step += 1;
        tch::no_grad(|| {
            let gradient = gradient.to_device(parameter.device());
            let weights = &parameter.detach();
            let update = Update { arguments: &self.arguments, weights, gradient, slots, number: *step };
            match self.arguments.kind {
                OptimizerKind::Sgd => update.sgd(),
                OptimizerKind::Adam => update.with_decay().adam(1.0),
                OptimizerKind::AdamW => {
                    let keep = 1.0 - self.arguments.learning_rate * self.arguments.weight_decay;
                    update.adam(keep)
                }
                OptimizerKind::Adagrad => update.adagrad(),
                OptimizerKind::RmsProp => update.rmsprop(),
                OptimizerKind::Ftrl => update.ftrl(),
            }
        })
    }
}

impl Update<'_> {
    /// Adds the L2 weight decay to the gradient.
    fn with_decay(self) -> Self {
        let decay = self.arguments.weight_decay;
        if decay == 0.0 {
            return self;
        }
        Self { gradient: self.gradient + self.weights * single(decay), ..self }
    }

    fn sgd(self) -> Tensor {
        let Self { arguments, weights, gradient, slots, .. } = self.with_decay();
        let momentum = single(arguments.momentum);
        let direction = match slots {
            [] => gradient,
            [mean, ..] => {
                *mean *= momentum;
                *mean += &gradient;
                if arguments.nesterov { gradient + &*mean * momentum } else { mean.shallow_clone() }
            }
        };
        weights - direction * single(arguments.learning_rate)
    }

    /// Adam and, where weights decay by themselves to `keep` times their value, AdamW.
    fn adam(self, keep: f64) -> Tensor {
        let Self { arguments, weights, gradient, slots, number } = self;
        let &Arguments { beta1, beta2, .. } = arguments;
        let corrected = |beta: f64| 1.0 - beta.powf(number as f64);
        let [mean, square, largest @ ..] = slots else { unreachable!("Adam keeps two or three slots") };
        *mean *= single(beta1);
        *mean += &gradient * single(1.0 - beta1);
        *square *= single(beta2);
        *square += (&gradient * single(1.0 - beta2)) * &gradient;
        let root = match largest.first_mut() {
            Some(largest) => {
                *largest = largest.maximum(square);
                largest.sqrt()
            }
            None => square.sqrt(),
        };
        let divisor = root * single(1.0 / corrected(beta2).sqrt()) + single(arguments.epsilon);
        let rate = single(arguments.learning_rate / corrected(beta1));
        weights * single(keep) - (&*mean * rate) / divisor
    }

    fn adagrad(self) -> Tensor {
        let Self { arguments, weights, gradient, slots, number } = self.with_decay();
        let [sum, ..] = slots else { unreachable!("Adagrad keeps one slot") };
        if number == 1 {
            let _ = sum.fill_(single(arguments.initial_accumulator));
        }
        *sum += &gradient * &gradient;
        let rate = arguments.learning_rate / (1.0 + (number - 1) as f64 * arguments.learning_rate_decay);
        weights - (gradient * single(rate)) / (sum.sqrt() + single(arguments.epsilon))
    }

    fn rmsprop(self) -> Tensor {
        let Self { arguments, weights, gradient, slots, .. } = self.with_decay();
        let fresh = single(1.0 - arguments.alpha);
        let [square, others @ ..] = slots else { unreachable!("RMSprop keeps one to three slots") };
        *square *= single(arguments.alpha);
        *square += (&gradient * &gradient) * fresh;
        let (means, updates) = others.split_at_mut(usize::from(arguments.centered));
        let variance = match means {
            [mean, ..] => {
                let change = (&gradient - &*mean) * fresh;
                *mean += change;
                // Rounding can make the difference negative.
                (&*square - &*mean * &*mean).clamp_min(0.0)
            }
            [] => square.shallow_clone(),
        };
        let quotient = gradient / (variance.sqrt() + single(arguments.epsilon));
        let direction = match updates {
            [update, ..] => {
                *update *= single(arguments.momentum);
                *update += quotient;
                update.shallow_clone()
            }
            [] => quotient,
        };
        weights - direction * single(arguments.learning_rate)
    }

    fn ftrl(self) -> Tensor {
        let Self { arguments, weights, gradient, slots, number } = self;
        let [squares, clamped] = slots else { unreachable!("FTRL keeps two slots") };
        if arguments.learning_rate == 0.0 {
            return weights.copy(); // 1/eta is infinite: the weights cannot move.
        }
        let l1 = single(arguments.l1);
        if number == 1 {
            // A weight other than 0 has more than l1 of evidence.
            *clamped = weights.sign() * -l1;
        }
        *squares += &gradient * &gradient;
        let inverse_rate = single(1.0 / arguments.learning_rate);
        let strength = (squares.sqrt() + single(arguments.beta)) * inverse_rate + single(arguments.l2);
        let raised = &*clamped + gradient;
        let evidence = &raised - &strength * weights;
        let next = evidence.clamp(-l1, l1);
        let moved = weights - (raised - &next) / strength;
        let values = moved.masked_fill(&evidence.eq_tensor(&next), 0.0);
        *clamped = next;
        values
    }
}

/// Rounds a factor to f32, as the loops over floats do before they use it.
fn single(factor: f64) -> f64 {
    f64::from(factor as f32)
}
