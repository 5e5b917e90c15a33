//! `spec.training.local`: trainers that train alone for some steps and then exchange what they have changed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConsistencyMode, TrainingError, in_range};

/// Local steps (DiLoCo, Douillard et al. 2023, arXiv 2311.08105): each trainer makes `steps` steps alone, with
/// `spec.training.optimizer` and its own state, and then gives the servers the difference to the parameters with which it began.
/// Servers treat it as a gradient and move along it by SGD with Nesterov momentum, when consistency.mode says so. An
/// exchange is needed once in so many steps. Example: `{steps: 50}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Local {
    /// Steps that a trainer makes between two exchanges, for example 50.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub steps: u32,
    /// Train on while an exchange is under way. What comes back is taken at the end of the next steps, and what those have
    /// changed is added to it. An exchange then costs no time up to the length of so many steps, and differences are one
    /// exchange old when they count. Default false.
    #[serde(default)]
    pub overlap: bool,
    /// The servers' learning rate: the share of the trainers' difference that they move. Default 1.
    #[serde(default = "default_learning_rate")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub learning_rate: f64,
    /// The servers' Nesterov momentum, 0 to 1. 0 together with learningRate 1 makes the parameters the mean of the trainers'
    /// (federated averaging). Long trainings of hundreds of exchanges take more, up to 0.9 with a learningRate of 0.7. Default:
    /// 0.3 in Sync; 0 in Async and Bounded, where each difference is applied alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub momentum: Option<f64>,
}

impl Local {
    /// The defaults, with so many steps between two exchanges.
    #[must_use]
    pub fn every(steps: u32) -> Self {
        Self { steps, overlap: false, learning_rate: default_learning_rate(), momentum: None }
    }

    pub(super) fn validate(&self) -> Result<(), TrainingError> {
        in_range("local.steps", self.steps, 1, 1_000_000, "50")?;
        in_range("local.learningRate", self.learning_rate, 0.0, 1000.0, "1")?;
        in_range("local.momentum", self.momentum.unwrap_or(0.0), 0.0, 1.0, "0.3")
    }

    /// Returns the servers' momentum in `mode`.
    #[must_use]
    pub fn momentum(&self, mode: ConsistencyMode) -> f64 {
        self.momentum.unwrap_or(if mode == ConsistencyMode::Sync { 0.3 } else { 0.0 })
    }
}

fn default_learning_rate() -> f64 {
    1.0
}
