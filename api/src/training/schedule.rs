//! `spec.training.schedule`: the learning rate over time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingError, in_range};

/// The learning rate over time. Steps are each trainer's own, so a schedule means the same in every
/// consistency mode and for any number of trainers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!(self.type in ['Linear', 'Cosine']) || self.totalSteps > 0",
        "message": "spec.training.schedule.totalSteps: Linear and Cosine need to know where they end; write the steps of one trainer, for example 10000",
    },
]))]
pub struct Schedule {
    /// Constant (default); Step: times `gamma` every `stepSize` steps; Linear or Cosine: down to
    /// `end` x learningRate at step `totalSteps`.
    #[serde(default, rename = "type")]
    pub kind: ScheduleKind,
    /// Steps at the start over which the rate rises in a straight line. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Step only: steps between two falls. Default 1000.
    #[serde(default = "default_step_size")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub step_size: u64,
    /// Step only: factor of one fall. Default 0.1.
    #[serde(default = "default_gamma")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub gamma: f64,
    /// Linear and Cosine: the step at which the end is reached, counted from 0 with the warm-up. They
    /// need it.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub total_steps: u64,
    /// Linear and Cosine: factor on the learning rate at the end. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub end: f64,
}

/// How the learning rate falls; as PyTorch's StepLR, LinearLR and CosineAnnealingLR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleKind {
    /// Not at all.
    #[default]
    Constant,
    /// In steps.
    Step,
    /// In a straight line.
    Linear,
    /// Along half a cosine.
    Cosine,
}

impl Schedule {
    pub(super) fn validate(&self) -> Result<(), TrainingError> {
        in_range("schedule.stepSize", self.step_size, 1, 1_000_000_000, "1000")?;
        in_range("schedule.gamma", self.gamma, 0.0, 1.0, "0.1")?;
        in_range("schedule.end", self.end, 0.0, 1.0, "0")?;
        let needs_total = matches!(self.kind, ScheduleKind::Linear | ScheduleKind::Cosine);
        if needs_total && self.total_steps == 0 {
            return TrainingError::refuse(
                "schedule.totalSteps",
                "Linear and Cosine need to know where they end",
                "write the steps of one trainer, for example 10000",
            );
        }
        Ok(())
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::default(),
            warmup_steps: 0,
            step_size: default_step_size(),
            gamma: default_gamma(),
            total_steps: 0,
            end: 0.0,
        }
    }
}

fn default_step_size() -> u64 {
    1000
}
fn default_gamma() -> f64 {
    0.1
}
