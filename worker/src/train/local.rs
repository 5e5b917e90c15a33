//! Training in one process with libtorch's own optimizer: what the parameter server is compared with.

use std::time::Duration;

use psjobs_api::training::{Optimizer, OptimizerKind};
use tch::{COptimizer, TchError, Tensor};

use super::flat::Flat;
use super::{UpdateError, Updater};
use crate::workload::Metrics;

/// libtorch's optimizer over a model's parameters.
#[derive(Debug)]
pub struct Local {
    optimizer: COptimizer,
}

impl Local {
    /// The optimizer that a job with these arguments would run on its servers.
    ///
    /// # Errors
    /// If libtorch refuses the arguments.
    pub fn new(flat: &Flat, arguments: &Optimizer) -> Result<Self, TchError> {
        let &Optimizer { learning_rate, momentum, nesterov, weight_decay, beta1, beta2, epsilon, amsgrad, .. } =
            arguments;
        let &Optimizer { alpha, centered, .. } = arguments;
        let mut optimizer = match arguments.kind {
            OptimizerKind::Sgd => COptimizer::sgd(learning_rate, momentum, 0.0, weight_decay, nesterov)?,
            OptimizerKind::Adam => COptimizer::adam(learning_rate, beta1, beta2, weight_decay, epsilon, amsgrad)?,
            OptimizerKind::AdamW => COptimizer::adamw(learning_rate, beta1, beta2, weight_decay, epsilon, amsgrad)?,
            OptimizerKind::RmsProp => {
                COptimizer::rms_prop(learning_rate, alpha, epsilon, weight_decay, momentum, centered)?
            }
            kind @ (OptimizerKind::Adagrad | OptimizerKind::Ftrl) => {
                let name = kind.name();
                return Err(TchError::Torch(format!("no {name} in one process; use servers, or another optimizer")));
            }
        };
        for parameter in flat.parameters() {
            optimizer.add_parameters(&parameter.tensor, 0)?;
        }
        Ok(Self { optimizer })
    }
}

impl Updater for Local {
    fn next_step(&self) -> u64 {
        0
    }

    fn update(&mut self, step: u64, loss: &Tensor) -> Result<u64, UpdateError> {
        self.optimizer.zero_grad()?;
        loss.f_backward()?;
        self.optimizer.step()?;
        Ok(step + 1)
    }

    fn report(&mut self, _examples: u64, _metrics: &Metrics) {}

    fn waiting(&self) -> Duration {
        Duration::ZERO
    }

    fn leave(self, _finished: bool, _examples: u64, _metrics: &Metrics) -> Result<(), UpdateError> {
        Ok(())
    }
}
