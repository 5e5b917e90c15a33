//! Training in one process, without servers: what the parameter server is compared with. The optimizer
//! is libtorch's own; those that its bindings lack, Adagrad and FTRL, are the servers', and so are all with parameter groups.

use std::fmt;
use std::time::Duration;

use psjobs_api::training::{self, NonFinite, OptimizerKind};
use psjobs_arithmetic::optimizer::{Optimizer, State};
use psjobs_arithmetic::parameter_group::Stretch;
use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::TimeSpent;
use psjobs_ps::parameter_group::{in_groups, stretches};
use psjobs_ps::schedule::Schedule;
use tch::{COptimizer, TchError, Tensor};

use super::flat::Flat;
use super::gradient_sum::GradientSum;
use super::plan::Turn;
use super::{UpdateError, Updater};
use crate::workload::Metrics;

/// A model's parameters and their optimizer, in this process.
#[derive(Debug)]
pub struct Local {
    optimizer: Rule,
    rate: f64,
    schedule: Schedule,
    /// A step whose gradient holds NaN or infinity is left out.
    skips: bool,
    /// The parameters have the gradients of micro-batches of the next step; only of libtorch's rule.
    has_gradients: bool,
}

enum Rule {
    Libtorch(Flat, COptimizer),
    Servers { flat: Flat, optimizer: Optimizer, state: State, stretches: Vec<Stretch>, sum: GradientSum },
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Libtorch(..) => "Libtorch",
            Self::Servers { .. } => "Servers",
        })
    }
}

impl Local {
    /// The optimizer that a job with these arguments would run on its servers.
    ///
    /// # Errors
    /// If libtorch refuses the arguments.
    pub fn new(flat: Flat, arguments: &training::Optimizer) -> Result<Self, TchError> {
        let &training::Optimizer { learning_rate, momentum, nesterov, weight_decay, beta1, beta2, epsilon, .. } =
            arguments;
        let &training::Optimizer { amsgrad, alpha, centered, .. } = arguments;
        let servers = |flat: Flat| {
            let stretches = stretches(&in_groups(flat.specs(), &arguments.groups));
            let optimizer = Optimizer::new(arguments);
            let state = optimizer.state(flat.elements());
            Rule::Servers { flat, optimizer, state, stretches, sum: GradientSum::default() }
        };
        let of_rule = |optimizer| {
            let (rate, schedule) = (learning_rate, Schedule::CONSTANT);
            Self { optimizer, rate, schedule, skips: false, has_gradients: false }
        };
        if !arguments.groups.is_empty() {
            return Ok(of_rule(servers(flat)));
        }
        let mut optimizer = match arguments.kind {
            OptimizerKind::Sgd => COptimizer::sgd(learning_rate, momentum, 0.0, weight_decay, nesterov)?,
            OptimizerKind::Adam => COptimizer::adam(learning_rate, beta1, beta2, weight_decay, epsilon, amsgrad)?,
            OptimizerKind::AdamW => COptimizer::adamw(learning_rate, beta1, beta2, weight_decay, epsilon, amsgrad)?,
            OptimizerKind::RmsProp => {
                COptimizer::rms_prop(learning_rate, alpha, epsilon, weight_decay, momentum, centered)?
            }
            OptimizerKind::Adagrad | OptimizerKind::Ftrl => return Ok(of_rule(servers(flat))),
        };
        for parameter in flat.parameters() {
            optimizer.add_parameters(&parameter.tensor, 0)?;
        }
        Ok(of_rule(Rule::Libtorch(flat, optimizer)))
    }

    /// As before, with another learning rate over time.
    #[must_use]
    pub fn with_schedule(self, schedule: Schedule) -> Self {
        Self { schedule, ..self }
    }

    /// As before, but with `Skip` it leaves out a step whose gradient holds NaN or infinity.
    #[must_use]
    pub fn with_non_finite(self, rule: NonFinite) -> Self {
        Self { skips: rule == NonFinite::Skip, ..self }
    }

    /// Computes the gradient of `loss`, that of a micro-batch, which is added to that of the next step.
    ///
    /// # Errors
    /// If libtorch cannot compute it.
    pub fn add_gradient(&mut self, loss: &Tensor) -> Result<(), TchError> {
        match &mut self.optimizer {
            Rule::Libtorch(_, optimizer) => {
                if !std::mem::replace(&mut self.has_gradients, true) {
                    optimizer.zero_grad()?;
                }
                loss.f_backward()
            }
            Rule::Servers { flat, sum, .. } => sum.add(flat.gradients(loss)?),
        }
    }

    /// Updates the model's parameters by the gradient of `loss`, at the learning rate of `step`.
    ///
    /// # Errors
    /// If libtorch cannot compute the gradient.
    pub fn step(&mut self, step: u64, loss: &Tensor) -> Result<(), TchError> {
        let (factor, skips) = (self.schedule.factor(step), self.skips);
        match &mut self.optimizer {
            Rule::Libtorch(flat, optimizer) => {
                if self.schedule != Schedule::CONSTANT {
                    optimizer.set_learning_rate(self.rate * factor)?;
                }
                if !std::mem::take(&mut self.has_gradients) {
                    optimizer.zero_grad()?;
                }
                loss.f_backward()?;
                if skips && !are_finite(flat.parameters().iter().map(|parameter| parameter.tensor.grad()))? {
                    return Ok(());
                }
                optimizer.step()
            }
            Rule::Servers { flat, optimizer, state, stretches, sum } => {
                let gradients = sum.end(flat.gradients(loss)?)?;
                if skips && !are_finite(gradients.iter().map(Tensor::shallow_clone))? {
                    return Ok(());
                }
                apply(flat, optimizer, (state, factor), stretches, gradients)
            }
        }
    }
}

/// Returns whether no gradient holds NaN or infinity.
fn are_finite(gradients: impl Iterator<Item = Tensor>) -> Result<bool, TchError> {
    for gradient in gradients.filter(Tensor::defined) {
        if gradient.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// One step of a servers' rule on the model's own tensors.
fn apply(
    flat: &mut Flat,
    optimizer: &Optimizer,
    (state, factor): (&mut State, f64),
    stretches: &[Stretch],
    gradients: Vec<Tensor>,
) -> Result<(), TchError> {
    let mut flat_gradient = vec![0.0_f32; flat.elements()];
    for (parameter, gradient) in flat.parameters().iter().zip(gradients).filter(|(_, gradient)| gradient.defined()) {
        gradient.f_copy_data(&mut flat_gradient[parameter.range.clone()], parameter.range.len())?;
    }
    let mut values = flat.values();
    optimizer.apply_by_group(&mut values, bytemuck::cast_slice(&flat_gradient), state, factor, stretches);
    flat.set(&values);
    Ok(())
}

impl Updater for Local {
    fn next_step(&self) -> u64 {
        0
    }

    fn accumulate(&mut self, loss: &Tensor) -> Result<(), UpdateError> {
        Ok(self.add_gradient(loss)?)
    }

    fn update(&mut self, turn: Turn, loss: &Tensor) -> Result<u64, UpdateError> {
        self.step(turn.step, loss)?;
        Ok(turn.step + 1)
    }

    fn settle(&mut self) -> Result<Option<u64>, UpdateError> {
        Ok(None) // Each update ends at once.
    }

    fn share(&self, _step: u64, _base: u32, _work: Work) -> Result<Option<Share>, UpdateError> {
        Ok(None) // Alone, it has all of a step.
    }

    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
        Ok(None) // No server deals.
    }

    fn entries(&self) -> u64 {
        0
    }

    fn report(&mut self, _examples: u64, _metrics: &Metrics, _spent: TimeSpent) {}

    fn record(&mut self, _step: u64, _metrics: &Metrics) {}

    fn waiting(&self) -> Duration {
        Duration::ZERO
    }

    fn leave(self, _finished: bool, _examples: u64, _metrics: &Metrics) -> Result<(), UpdateError> {
        Ok(())
    }

    fn fail(self, _failure: String) {}
}
