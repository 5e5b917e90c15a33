//! The optimizer's arguments as flags. In a job they come from `spec.training.optimizer`; a flag
//! overrides its field.

use psjobs_api::training::{Optimizer, OptimizerKind};

/// Each overrides its field of spec.training.optimizer.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct OptimizerArgs {
    /// The optimizer, defined as in PyTorch [default: sgd]
    #[arg(long, value_name = "NAME")]
    pub optimizer: Option<Kind>,
    /// Step size [default: 0.01]
    #[arg(long, value_name = "LR")]
    pub learning_rate: Option<f64>,
    /// SGD: share of the last update that is added to the next [default: 0]
    #[arg(long, value_name = "M")]
    pub momentum: Option<f64>,
    /// SGD: look ahead along the momentum
    #[arg(long)]
    pub nesterov: bool,
    /// L2 penalty, added to the gradient as weight decay x parameter [default: 0]
    #[arg(long, value_name = "W")]
    pub weight_decay: Option<f64>,
    /// Adam: decay of the running mean of gradients [default: 0.9]
    #[arg(long, value_name = "B")]
    pub beta1: Option<f64>,
    /// Adam: decay of the running mean of squared gradients [default: 0.999]
    #[arg(long, value_name = "B")]
    pub beta2: Option<f64>,
    /// Adam: added to the denominator [default: 1e-8]
    #[arg(long, value_name = "E")]
    pub epsilon: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    Sgd,
    Adam,
}

impl OptimizerArgs {
    /// True if any flag was given.
    #[must_use]
    pub fn given(&self) -> bool {
        *self != Self::default()
    }

    /// Writes the flags that were given over the job's values.
    pub fn apply(&self, to: &mut Optimizer) {
        if let Some(kind) = self.optimizer {
            to.kind = match kind {
                Kind::Sgd => OptimizerKind::Sgd,
                Kind::Adam => OptimizerKind::Adam,
            };
        }
        to.nesterov |= self.nesterov;
        for (flag, field) in [
            (self.learning_rate, &mut to.learning_rate),
            (self.momentum, &mut to.momentum),
            (self.weight_decay, &mut to.weight_decay),
            (self.beta1, &mut to.beta1),
            (self.beta2, &mut to.beta2),
            (self.epsilon, &mut to.epsilon),
        ] {
            if let Some(value) = flag {
                *field = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_overrides_its_field_and_no_other() {
        let mut optimizer = Optimizer { momentum: 0.5, learning_rate: 0.2, ..Optimizer::default() };
        let flags = OptimizerArgs { learning_rate: Some(0.1), nesterov: true, ..OptimizerArgs::default() };
        assert!(flags.given() && !OptimizerArgs::default().given());
        flags.apply(&mut optimizer);
        let want = Optimizer { momentum: 0.5, learning_rate: 0.1, nesterov: true, ..Optimizer::default() };
        assert_eq!(optimizer, want);
    }
}
