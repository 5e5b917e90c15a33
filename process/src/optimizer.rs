//! The optimizer's arguments as flags. In a job they come from `spec.training.optimizer`; a flag
//! overrides its field.

use psjobs_api::training::{Optimizer, OptimizerKind};

/// Each overrides its field of spec.training.optimizer. One that the optimizer does not have is refused.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct OptimizerArgs {
    /// The optimizer, defined as in PyTorch [default: sgd]
    #[arg(long, value_name = "NAME")]
    pub optimizer: Option<Kind>,
    /// Step size [default: 0.01]
    #[arg(long, value_name = "LR")]
    pub learning_rate: Option<f64>,
    /// SGD, RMSprop: share of the last update that is added to the next [default: 0]
    #[arg(long, value_name = "M")]
    pub momentum: Option<f64>,
    /// SGD: look ahead along the momentum
    #[arg(long)]
    pub nesterov: bool,
    /// All but FTRL: L2 penalty; with AdamW the parameter shrinks by learning rate x W instead [default: 0]
    #[arg(long, value_name = "W")]
    pub weight_decay: Option<f64>,
    /// Adam, AdamW: decay of the running mean of gradients [default: 0.9]
    #[arg(long, value_name = "B")]
    pub beta1: Option<f64>,
    /// Adam, AdamW: decay of the running mean of squared gradients [default: 0.999]
    #[arg(long, value_name = "B")]
    pub beta2: Option<f64>,
    /// Adam, AdamW, Adagrad, RMSprop: added to the denominator [default: 1e-8]
    #[arg(long, value_name = "E")]
    pub epsilon: Option<f64>,
    /// Adam, AdamW: divide by the root of the largest mean of squares so far
    #[arg(long)]
    pub amsgrad: bool,
    /// RMSprop: decay of the running mean of squared gradients [default: 0.99]
    #[arg(long, value_name = "A")]
    pub alpha: Option<f64>,
    /// RMSprop: divide by the root of the variance, not of the mean square
    #[arg(long)]
    pub centered: bool,
    /// Adagrad: update t, counted from 0, has the learning rate divided by 1 + t x D [default: 0]
    #[arg(long, value_name = "D")]
    pub learning_rate_decay: Option<f64>,
    /// Adagrad: what the sums of squared gradients start from [default: 0]
    #[arg(long, value_name = "A")]
    pub initial_accumulator: Option<f64>,
    /// FTRL: lowers the rate of parameters that got few gradients [default: 1]
    #[arg(long, value_name = "B")]
    pub beta: Option<f64>,
    /// FTRL: L1 penalty; parameters with less evidence than this are exactly 0 [default: 0]
    #[arg(long, value_name = "L")]
    pub l1: Option<f64>,
    /// FTRL: L2 penalty [default: 0]
    #[arg(long, value_name = "L")]
    pub l2: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lower")]
pub enum Kind {
    Sgd,
    Adam,
    AdamW,
    Adagrad,
    RmsProp,
    Ftrl,
}

impl From<Kind> for OptimizerKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Sgd => Self::Sgd,
            Kind::Adam => Self::Adam,
            Kind::AdamW => Self::AdamW,
            Kind::Adagrad => Self::Adagrad,
            Kind::RmsProp => Self::RmsProp,
            Kind::Ftrl => Self::Ftrl,
        }
    }
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
            to.kind = kind.into();
        }
        to.nesterov |= self.nesterov;
        to.amsgrad |= self.amsgrad;
        to.centered |= self.centered;
        for (flag, field) in [
            (self.learning_rate, &mut to.learning_rate),
            (self.momentum, &mut to.momentum),
            (self.weight_decay, &mut to.weight_decay),
            (self.beta1, &mut to.beta1),
            (self.beta2, &mut to.beta2),
            (self.epsilon, &mut to.epsilon),
            (self.alpha, &mut to.alpha),
            (self.learning_rate_decay, &mut to.learning_rate_decay),
            (self.initial_accumulator, &mut to.initial_accumulator),
            (self.beta, &mut to.beta),
            (self.l1, &mut to.l1),
            (self.l2, &mut to.l2),
        ] {
            if let Some(value) = flag {
                *field = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        optimizer: OptimizerArgs,
    }

    fn applied(flags: &str, mut to: Optimizer) -> Optimizer {
        let flags = Flags::try_parse_from(["test"].into_iter().chain(flags.split_whitespace()));
        flags.unwrap_or_else(|e| panic!("{e}")).optimizer.apply(&mut to);
        to
    }

    #[test]
    fn a_flag_overrides_its_field_and_no_other() {
        let job = Optimizer { momentum: 0.5, learning_rate: 0.2, ..Optimizer::default() };
        let found = applied("--learning-rate 0.1 --nesterov", job);
        assert_eq!(found, Optimizer { momentum: 0.5, learning_rate: 0.1, nesterov: true, ..Optimizer::default() });
        assert!(!OptimizerArgs::default().given());
    }

    /// Goes through the manifest's own fields, so that a new one without a flag fails here.
    #[test]
    fn every_field_of_a_manifests_optimizer_has_its_flag() {
        let fields = serde_json::to_value(Optimizer::default()).expect("plain data");
        for (field, default) in fields.as_object().expect("a mapping").iter().filter(|(field, _)| *field != "type") {
            let dashed = |(place, letter): (usize, char)| match letter {
                'A'..='Z' if place > 0 => format!("-{}", letter.to_ascii_lowercase()),
                _ => letter.to_string(),
            };
            let flag: String = field.chars().enumerate().map(dashed).collect();
            let value = if default.is_boolean() { "" } else { "0.125" };
            let found = applied(&format!("--{flag} {value}"), Optimizer::default());
            let found = serde_json::to_value(found).expect("plain data");
            let changed: Vec<_> = fields.as_object().into_iter().flatten().filter(|(k, v)| found[*k] != **v).collect();
            assert_eq!(changed, [(field, default)], "--{flag} {value}");
        }
    }

    #[test]
    fn every_kind_is_spelt_in_lower_case() {
        use OptimizerKind::{Adagrad, Adam, AdamW, Ftrl, RmsProp, Sgd};
        for kind in [Sgd, Adam, AdamW, Adagrad, RmsProp, Ftrl] {
            let flags = format!("--optimizer {}", kind.name().to_lowercase());
            assert_eq!(applied(&flags, Optimizer::default()).kind, kind, "{flags}");
        }
    }
}
