//! `spec.training.optimizer`: the rule that turns gradients into updates, and its arguments.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingError, in_range};

/// The optimizer and its arguments, named and defined as in PyTorch. An argument that the type
/// does not have is refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!self.nesterov || self.momentum > 0.0",
        "message": "spec.training.optimizer.nesterov needs momentum; set momentum above 0, for example 0.9, or remove nesterov",
    },
    {
        "rule": "self.type in ['SGD', 'RMSprop'] || self.momentum == 0.0",
        "message": "spec.training.optimizer.momentum is an argument of SGD and RMSprop; remove it, or use one of these types",
    },
    {
        "rule": "self.type == 'SGD' || !self.nesterov",
        "message": "spec.training.optimizer.nesterov is an argument of SGD; remove it, or use type SGD",
    },
    {
        "rule": "self.type != 'FTRL' || self.weightDecay == 0.0",
        "message": "spec.training.optimizer: FTRL has no weightDecay; write l2 instead",
    },
    {
        "rule": "self.type != 'FTRL' || !has(self.groups) || self.groups.all(group, !has(group.weightDecay) || group.weightDecay == 0.0)",
        "message": "spec.training.optimizer.groups: FTRL has no weightDecay; remove it",
    },
    {
        "rule": "self.type in ['Adam', 'AdamW'] || (self.beta1 == 0.9 && self.beta2 == 0.999 && !self.amsgrad)",
        "message": "spec.training.optimizer: beta1, beta2 and amsgrad are arguments of Adam and AdamW; remove them, or use one of these types",
    },
    {
        "rule": "!(self.type in ['SGD', 'FTRL']) || self.epsilon == 1e-8",
        "message": "spec.training.optimizer: SGD and FTRL have no epsilon; remove it",
    },
    {
        "rule": "self.type == 'RMSprop' || (self.alpha == 0.99 && !self.centered)",
        "message": "spec.training.optimizer: alpha and centered are arguments of RMSprop; remove them, or use type RMSprop",
    },
    {
        "rule": "self.type == 'Adagrad' || (self.learningRateDecay == 0.0 && self.initialAccumulator == 0.0)",
        "message": "spec.training.optimizer: learningRateDecay and initialAccumulator are arguments of Adagrad; remove them, or use type Adagrad",
    },
    {
        "rule": "self.type == 'FTRL' || (self.beta == 1.0 && self.l1 == 0.0 && self.l2 == 0.0)",
        "message": "spec.training.optimizer: beta, l1 and l2 are arguments of FTRL; remove them, or use type FTRL",
    },
]))]
pub struct Optimizer {
    /// SGD (default), Adam, AdamW, Adagrad, RMSprop or FTRL.
    #[serde(default, rename = "type")]
    pub kind: OptimizerKind,
    /// Step size. Default 0.01, which suits SGD, Adagrad and RMSprop; Adam and AdamW usually want
    /// 0.001, FTRL 0.1.
    #[serde(default = "default_learning_rate")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub learning_rate: f64,
    /// SGD and RMSprop: share of the last update that is added to the next, 0 to 1. With SGD in Async and Bounded
    /// spec.training.staleness.momentum says whose updates. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub momentum: f64,
    /// SGD only: look ahead along the momentum (Nesterov). Needs momentum above 0. Default false.
    #[serde(default)]
    pub nesterov: bool,
    /// L2 penalty, added to the gradient as weightDecay x parameter; with AdamW the parameter
    /// shrinks by learningRate x weightDecay instead. FTRL has l2 for it. Default 0; AdamW usually
    /// wants 0.01.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub weight_decay: f64,
    /// Adam and AdamW: decay of the running mean of gradients, below 1. Default 0.9.
    #[serde(default = "default_beta1")]
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub beta1: f64,
    /// Adam and AdamW: decay of the running mean of squared gradients, below 1. Default 0.999.
    #[serde(default = "default_beta2")]
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub beta2: f64,
    /// Adam, AdamW, Adagrad and RMSprop: added to the denominator. Default 1e-8.
    #[serde(default = "default_epsilon")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub epsilon: f64,
    /// Adam and AdamW: divide by the root of the largest mean of squares so far (AMSGrad).
    /// Default false.
    #[serde(default)]
    pub amsgrad: bool,
    /// RMSprop only: decay of the running mean of squared gradients, below 1. Default 0.99.
    #[serde(default = "default_alpha")]
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub alpha: f64,
    /// RMSprop only: divide by the root of the gradient's estimated variance, not of its mean
    /// square. Default false.
    #[serde(default)]
    pub centered: bool,
    /// Adagrad only: the learning rate of update t, counted from 0, is divided by
    /// 1 + t x learningRateDecay. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub learning_rate_decay: f64,
    /// Adagrad only: what the sums of squared gradients start from. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub initial_accumulator: f64,
    /// FTRL only: lowers the rate of parameters that got few gradients, above 0. Default 1.
    #[serde(default = "default_beta")]
    #[schemars(range(min = 0.000_001, max = 1000.0))]
    pub beta: f64,
    /// FTRL only: L1 penalty; a parameter with less evidence than this is exactly 0. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub l1: f64,
    /// FTRL only: L2 penalty. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub l2: f64,
    /// Parameters that are trained otherwise, as biases without weight decay. The first group that a
    /// parameter's name matches holds for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub groups: Vec<OptimizerGroup>,
}

/// Parameters that the optimizer treats otherwise. Example: `{parameters: "*.bias", weightDecay: 0}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OptimizerGroup {
    /// Which parameters, by name; `*` stands for any characters.
    #[schemars(length(min = 1, max = 256))]
    pub parameters: String,
    /// Factor on learningRate, whose schedule holds for all groups; 0 keeps the parameters as they are. Default 1.
    #[serde(default = "default_learning_rate_factor")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub learning_rate_factor: f64,
    /// Instead of the optimizer's weightDecay. Default: that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub weight_decay: Option<f64>,
}

impl OptimizerGroup {
    /// Returns whether a parameter's name matches.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.parameters.split('*');
        let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }
}

/// Which optimizer the servers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OptimizerKind {
    /// Stochastic gradient descent with momentum, Nesterov momentum and weight decay.
    #[default]
    #[serde(rename = "SGD")]
    Sgd,
    /// Adam (Kingma and Ba, ICLR 2015) with L2 weight decay.
    Adam,
    /// Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).
    AdamW,
    /// Adagrad (Duchi et al., JMLR 2011), for sparse features.
    Adagrad,
    /// RMSprop (Hinton, 2012), plain or centered, with momentum.
    #[serde(rename = "RMSprop")]
    RmsProp,
    /// FTRL-Proximal (McMahan et al., KDD 2013), whose L1 penalty gives exact zeros.
    #[serde(rename = "FTRL")]
    Ftrl,
}

impl OptimizerKind {
    /// The name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sgd => "SGD",
            Self::Adam => "Adam",
            Self::AdamW => "AdamW",
            Self::Adagrad => "Adagrad",
            Self::RmsProp => "RMSprop",
            Self::Ftrl => "FTRL",
        }
    }
}

/// The type, the learning rate, and each argument that is not the default, as in "SGD learningRate=0.01 momentum=0.9".
impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = |optimizer: &Self| serde_json::to_value(optimizer).map_err(|_| fmt::Error);
        let (own, default) = (fields(self)?, fields(&Self::default())?);
        f.write_str(self.kind.name())?;
        for (name, value) in own.as_object().into_iter().flatten() {
            if name == "learningRate" || (name != "type" && default.get(name) != Some(value)) {
                write!(f, " {name}={value}")?;
            }
        }
        Ok(())
    }
}

impl Optimizer {
    pub(super) fn validate(&self) -> Result<(), TrainingError> {
        for (field, value, low, high, example) in [
            ("optimizer.learningRate", self.learning_rate, 0.0, 1000.0, "0.01"),
            ("optimizer.momentum", self.momentum, 0.0, 1.0, "0.9"),
            ("optimizer.weightDecay", self.weight_decay, 0.0, 1000.0, "0.0005"),
            ("optimizer.beta1", self.beta1, 0.0, BELOW_1, "0.9"),
            ("optimizer.beta2", self.beta2, 0.0, BELOW_1, "0.999"),
            ("optimizer.epsilon", self.epsilon, 0.0, 1.0, "1e-8"),
            ("optimizer.alpha", self.alpha, 0.0, BELOW_1, "0.99"),
            ("optimizer.learningRateDecay", self.learning_rate_decay, 0.0, 1000.0, "0.001"),
            ("optimizer.initialAccumulator", self.initial_accumulator, 0.0, 1000.0, "0.1"),
            ("optimizer.beta", self.beta, 0.000_001, 1000.0, "1"),
            ("optimizer.l1", self.l1, 0.0, 1000.0, "1"),
            ("optimizer.l2", self.l2, 0.0, 1000.0, "1"),
        ] {
            in_range(field, value, low, high, example)?;
        }
        self.takes_its_arguments()?;
        for OptimizerGroup { parameters, learning_rate_factor, weight_decay } in &self.groups {
            if parameters.is_empty() {
                let advice = "write which parameters it is for, for example \"*.bias\"";
                return TrainingError::refuse("optimizer.groups", "a group names no parameters", advice);
            }
            in_range("optimizer.groups.learningRateFactor", *learning_rate_factor, 0.0, 1000.0, "0.1")?;
            in_range("optimizer.groups.weightDecay", weight_decay.unwrap_or(0.0), 0.0, 1000.0, "0")?;
        }
        if self.nesterov && self.momentum == 0.0 {
            let advice = "set momentum above 0, for example 0.9, or remove nesterov";
            return TrainingError::refuse("optimizer.nesterov", "nesterov needs momentum", advice);
        }
        Ok(())
    }

    /// Refuses an argument that the type does not have: it would silently do nothing.
    fn takes_its_arguments(&self) -> Result<(), TrainingError> {
        use OptimizerKind::{Adagrad, Adam, AdamW, Ftrl, RmsProp, Sgd};
        let default = Self::default();
        for (field, given, kinds) in [
            ("optimizer.momentum", self.momentum != 0.0, &[Sgd, RmsProp][..]),
            ("optimizer.nesterov", self.nesterov, &[Sgd]),
            ("optimizer.weightDecay", self.weight_decay != 0.0, &[Sgd, Adam, AdamW, Adagrad, RmsProp]),
            ("optimizer.beta1", self.beta1 != default.beta1, &[Adam, AdamW]),
            ("optimizer.beta2", self.beta2 != default.beta2, &[Adam, AdamW]),
            ("optimizer.epsilon", self.epsilon != default.epsilon, &[Adam, AdamW, Adagrad, RmsProp]),
            ("optimizer.amsgrad", self.amsgrad, &[Adam, AdamW]),
            ("optimizer.alpha", self.alpha != default.alpha, &[RmsProp]),
            ("optimizer.centered", self.centered, &[RmsProp]),
            ("optimizer.learningRateDecay", self.learning_rate_decay != 0.0, &[Adagrad]),
            ("optimizer.initialAccumulator", self.initial_accumulator != 0.0, &[Adagrad]),
            ("optimizer.beta", self.beta != default.beta, &[Ftrl]),
            ("optimizer.l1", self.l1 != 0.0, &[Ftrl]),
            ("optimizer.l2", self.l2 != 0.0, &[Ftrl]),
            (
                "optimizer.groups.weightDecay",
                self.groups.iter().any(|group| group.weight_decay.is_some_and(|decay| decay != 0.0)),
                &[Sgd, Adam, AdamW, Adagrad, RmsProp],
            ),
        ] {
            if given && !kinds.contains(&self.kind) {
                let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                let advice = format!("remove it, or use type {}", names.join(" or "));
                return TrainingError::refuse(field, format!("{} has no such argument", self.kind.name()), advice);
            }
        }
        Ok(())
    }
}

/// Greatest decay of a running mean: at 1 it would never move.
const BELOW_1: f64 = 0.999_999;

fn default_learning_rate() -> f64 {
    0.01
}
fn default_learning_rate_factor() -> f64 {
    1.0
}
fn default_beta1() -> f64 {
    0.9
}
fn default_beta2() -> f64 {
    0.999
}
fn default_epsilon() -> f64 {
    1e-8
}
fn default_alpha() -> f64 {
    0.99
}
fn default_beta() -> f64 {
    1.0
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Sgd,
            learning_rate: default_learning_rate(),
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            beta1: default_beta1(),
            beta2: default_beta2(),
            epsilon: default_epsilon(),
            amsgrad: false,
            alpha: default_alpha(),
            centered: false,
            learning_rate_decay: 0.0,
            initial_accumulator: 0.0,
            beta: default_beta(),
            l1: 0.0,
            l2: 0.0,
            groups: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_shown_in_one_line_without_its_defaults() {
        for (json, text) in [
            ("{}", "SGD learningRate=0.01"),
            (r#"{"learningRate":0.1,"momentum":0.9}"#, "SGD learningRate=0.1 momentum=0.9"),
            (r#"{"type":"Adam","learningRate":0.001,"amsgrad":true}"#, "Adam amsgrad=true learningRate=0.001"),
        ] {
            assert_eq!(serde_json::from_str::<Optimizer>(json).expect(json).to_string(), text);
        }
    }

    #[test]
    fn impossible_values_are_refused_with_the_field() {
        for (json, field) in [
            (r#"{"learningRate":-1}"#, "optimizer.learningRate"),
            (r#"{"momentum":1.5}"#, "optimizer.momentum"),
            (r#"{"nesterov":true}"#, "optimizer.nesterov"),
            (
                r#"{"type":"Adam","momentum":0.9}"#,
                "optimizer.momentum: Adam has no such argument; remove it, or use type SGD or RMSprop",
            ),
            (r#"{"type":"Adam","beta2":1}"#, "optimizer.beta2"),
            (r#"{"beta2":0.9}"#, "optimizer.beta2: SGD has no such argument"),
            (r#"{"type":"RMSprop","alpha":1}"#, "optimizer.alpha"),
            (r#"{"type":"RMSprop","momentum":0.9,"nesterov":true}"#, "optimizer.nesterov"),
            (r#"{"type":"Adagrad","amsgrad":true}"#, "optimizer.amsgrad"),
            (r#"{"type":"AdamW","initialAccumulator":1}"#, "optimizer.initialAccumulator"),
            (r#"{"type":"FTRL","beta":0}"#, "optimizer.beta"),
            (r#"{"type":"FTRL","weightDecay":0.1}"#, "optimizer.weightDecay: FTRL has no such argument"),
            (r#"{"type":"FTRL","epsilon":0.1}"#, "optimizer.epsilon"),
            (r#"{"type":"SGD","l1":0.1}"#, "optimizer.l1"),
            (r#"{"groups":[{"parameters":""}]}"#, "optimizer.groups: a group names no parameters"),
            (r#"{"groups":[{"parameters":"w","learningRateFactor":-1}]}"#, "optimizer.groups.learningRateFactor"),
            (r#"{"type":"FTRL","groups":[{"parameters":"w","weightDecay":1}]}"#, "FTRL has no such argument"),
        ] {
            let optimizer: Optimizer = serde_json::from_str(json).expect("parses");
            let error = optimizer.validate().expect_err(json).to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, names, others) in [
            ("head.bias", &["head.bias"][..], &["head.bias2", "a.head.bias", ""][..]),
            ("*.bias", &["a.bias", "a.b.bias", ".bias"], &["bias", "a.bias.b"]),
            ("head.*", &["head.", "head.a.b"], &["head", "a.head.b"]),
            ("*", &["", "a"], &[]),
            ("a*b*c", &["abc", "a.b.c", "abbcc"], &["ac", "acb", "abcd", "ab"]),
            ("a*a", &["aa", "aba"], &["a"]),
        ] {
            let group = OptimizerGroup { parameters: pattern.into(), learning_rate_factor: 1.0, weight_decay: None };
            assert!(names.iter().all(|name| group.matches(name)), "{pattern}");
            assert!(!others.iter().any(|name| group.matches(name)), "{pattern}");
        }
    }

    #[test]
    fn every_type_takes_its_own_arguments() {
        for json in [
            r#"{"type":"SGD","momentum":0.9,"nesterov":true,"weightDecay":0.1}"#,
            r#"{"type":"Adam","beta1":0.8,"beta2":0.9,"epsilon":1e-6,"amsgrad":true,"weightDecay":0.1}"#,
            r#"{"type":"AdamW","weightDecay":0.01,"amsgrad":true}"#,
            r#"{"type":"Adagrad","learningRateDecay":0.1,"initialAccumulator":0.1,"epsilon":1e-10,"weightDecay":0.1}"#,
            r#"{"type":"RMSprop","alpha":0.9,"centered":true,"momentum":0.9,"epsilon":1e-6,"weightDecay":0.1}"#,
            r#"{"type":"FTRL","beta":0.5,"l1":1,"l2":1}"#,
        ] {
            let optimizer: Optimizer = serde_json::from_str(json).expect(json);
            assert_eq!(optimizer.validate(), Ok(()), "{json}");
            let name = serde_json::to_value(optimizer.kind).expect("serializes");
            assert_eq!(name, optimizer.kind.name());
        }
    }
}
