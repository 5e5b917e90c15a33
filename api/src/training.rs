//! `spec.training`: what every process of a job must agree on. The operator and `psjobs run` hand
//! it to servers and trainers as JSON in `PSJOB_TRAINING`; flags can override single values when a
//! role is started by hand.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the job trains: consistency, optimizer, batch size and seed. Every process of the job gets
/// the same values. Example: `{consistency: {mode: Sync}, optimizer: {type: Adam, learningRate: 0.001}}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Training {
    /// When a server applies a gradient and answers the trainer.
    #[serde(default)]
    pub consistency: Consistency,
    /// The rule that turns gradients into parameter updates. It runs on the servers.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// How many examples a trainer reads in one step.
    #[serde(default)]
    pub batch: Batch,
    /// Seed of the initial parameters, of the shuffling of the data and of dropout. Two Sync runs
    /// with one seed give equal parameters. Default 1.
    #[serde(default = "default_seed")]
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub seed: u64,
}

/// When a gradient takes effect.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Consistency {
    /// Async (default): each gradient is applied when it arrives and answered at once, so a slow
    /// trainer delays nobody. Sync: a step is applied when the gradients of all trainers are in,
    /// as one mean, summed in the order of the trainers.
    #[serde(default)]
    pub mode: ConsistencyMode,
}

/// The consistency model; names as in the literature (Li et al., OSDI 2014).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConsistencyMode {
    /// Bulk synchronous: one update a step, the mean over all trainers.
    Sync,
    /// Asynchronous: one update for each gradient, on arrival.
    #[default]
    Async,
}

/// The optimizer and its arguments, named and defined as in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Optimizer {
    /// SGD (default) or Adam.
    #[serde(default, rename = "type")]
    pub kind: OptimizerKind,
    /// Step size. Default 0.01, which suits SGD; Adam usually wants 0.001.
    #[serde(default = "default_learning_rate")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub learning_rate: f64,
    /// SGD only: share of the last update that is added to the next, 0 to 1. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub momentum: f64,
    /// SGD only: look ahead along the momentum (Nesterov). Needs momentum above 0. Default false.
    #[serde(default)]
    pub nesterov: bool,
    /// L2 penalty, added to the gradient as weightDecay x parameter. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub weight_decay: f64,
    /// Adam only: decay of the running mean of gradients, below 1. Default 0.9.
    #[serde(default = "default_beta1")]
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub beta1: f64,
    /// Adam only: decay of the running mean of squared gradients, below 1. Default 0.999.
    #[serde(default = "default_beta2")]
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub beta2: f64,
    /// Adam only: added to the denominator. Default 1e-8.
    #[serde(default = "default_epsilon")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub epsilon: f64,
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
}

/// Examples a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Batch {
    /// Examples that one trainer reads in one step. Default 32.
    #[serde(default = "default_batch")]
    #[schemars(range(min = 1, max = 65_536))]
    pub base: u32,
}

/// A value of `spec.training` that cannot work; the text names the field and what to write.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("spec.training.{field}: {problem}; {advice}")]
pub struct TrainingError {
    field: &'static str,
    problem: String,
    advice: &'static str,
}

impl Training {
    /// Checks the ranges that the schema states and the rules between fields, for values that
    /// reach a process without passing an API server.
    ///
    /// # Errors
    /// The first field that cannot work.
    pub fn validate(&self) -> Result<(), TrainingError> {
        let optimizer = &self.optimizer;
        let fail = |field, problem: String, advice| Err(TrainingError { field, problem, advice });
        for (field, value, low, high, advice) in [
            (
                "optimizer.learningRate",
                optimizer.learning_rate,
                0.0,
                1000.0,
                "write a number from 0 to 1000, for example 0.01",
            ),
            ("optimizer.momentum", optimizer.momentum, 0.0, 1.0, "write a number from 0 to 1, for example 0.9"),
            (
                "optimizer.weightDecay",
                optimizer.weight_decay,
                0.0,
                1000.0,
                "write a number from 0 to 1000, for example 0.0005",
            ),
            ("optimizer.beta1", optimizer.beta1, 0.0, 0.999_999, "write a number below 1, for example 0.9"),
            ("optimizer.beta2", optimizer.beta2, 0.0, 0.999_999, "write a number below 1, for example 0.999"),
            ("optimizer.epsilon", optimizer.epsilon, 0.0, 1.0, "write a small number, for example 1e-8"),
        ] {
            if !(low..=high).contains(&value) {
                return fail(field, format!("{value} is out of range"), advice);
            }
        }
        if optimizer.nesterov && optimizer.momentum == 0.0 {
            return fail("optimizer.nesterov", "nesterov needs momentum".into(), NESTEROV_ADVICE);
        }
        if optimizer.kind == OptimizerKind::Adam && (optimizer.momentum != 0.0 || optimizer.nesterov) {
            return fail("optimizer.momentum", "Adam has no momentum argument".into(), ADAM_ADVICE);
        }
        if !(1..=65_536).contains(&self.batch.base) {
            return fail(
                "batch.base",
                format!("{} is out of range", self.batch.base),
                "write a number from 1 to 65536, for example 32",
            );
        }
        Ok(())
    }
}

const NESTEROV_ADVICE: &str = "set momentum above 0, for example 0.9, or remove nesterov";
const ADAM_ADVICE: &str = "remove momentum and nesterov, or use type SGD; Adam's running mean is set by beta1";

fn default_seed() -> u64 {
    1
}
fn default_learning_rate() -> f64 {
    0.01
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
fn default_batch() -> u32 {
    32
}

impl Default for Training {
    fn default() -> Self {
        Self {
            consistency: Consistency::default(),
            optimizer: Optimizer::default(),
            batch: Batch::default(),
            seed: default_seed(),
        }
    }
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
        }
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self { base: default_batch() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_json_gives_the_documented_defaults() {
        let training: Training = serde_json::from_str("{}").expect("all fields have defaults");
        assert_eq!(training.seed, 1);
        assert_eq!(training.batch.base, 32);
        assert_eq!(training.consistency.mode, ConsistencyMode::Async);
        assert_eq!(training.optimizer, Optimizer::default());
        training.validate().expect("the defaults are valid");
    }

    #[test]
    fn impossible_values_are_refused_with_the_field() {
        let rows = [
            (r#"{"optimizer":{"learningRate":-1}}"#, "optimizer.learningRate"),
            (r#"{"optimizer":{"momentum":1.5}}"#, "optimizer.momentum"),
            (r#"{"optimizer":{"nesterov":true}}"#, "optimizer.nesterov"),
            (r#"{"optimizer":{"type":"Adam","momentum":0.9}}"#, "optimizer.momentum"),
            (r#"{"optimizer":{"type":"Adam","beta2":1}}"#, "optimizer.beta2"),
            (r#"{"batch":{"base":0}}"#, "batch.base"),
        ];
        for (json, field) in rows {
            let training: Training = serde_json::from_str(json).expect("parses");
            let error = training.validate().expect_err(json).to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let error = serde_json::from_str::<Training>(r#"{"optimiser":{}}"#).expect_err("typo");
        assert!(error.to_string().contains("optimiser"), "{error}");
    }
}
