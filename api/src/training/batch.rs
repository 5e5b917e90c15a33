//! `spec.training.batch`: how many examples a trainer reads in one step.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingError, in_range};

/// The most examples that a trainer can read in one step.
const MOST: u32 = 65_536;

/// Examples a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.adaptive || (self.min == 1 && !has(self.max))",
        "message": "spec.training.batch: min and max are the bounds of an adaptive batch; remove them, or set adaptive to true",
    },
    {
        "rule": "self.min <= self.base && (!has(self.max) || self.base <= self.max)",
        "message": "spec.training.batch.base must lie between min and max; write bounds around it, or remove them",
    },
]))]
pub struct Batch {
    /// Examples that one trainer reads in one step. Default 32.
    #[serde(default = "default_base")]
    #[schemars(range(min = 1, max = 65_536))]
    pub base: u32,
    /// Deal the examples of a step out by the trainers' measured speed, so that a slow one reads fewer
    /// and no trainer waits for it: all together read trainers x base examples a step as before, and each
    /// gradient counts by its examples. Two runs are then no longer equal bit for bit. Not with
    /// backupTrainers, which leave the slow ones out instead. Default false.
    #[serde(default)]
    pub adaptive: bool,
    /// Adaptive only: the fewest examples that a trainer reads in a step, at most base. Default 1.
    #[serde(default = "default_min")]
    #[schemars(range(min = 1, max = 65_536))]
    pub min: u32,
    /// Adaptive only: the most examples that a trainer reads in a step, at least base. Default: four
    /// times base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub max: Option<u32>,
}

impl Batch {
    /// The most examples that a trainer reads in a step of an adaptive job.
    #[must_use]
    pub fn most(&self) -> u32 {
        self.max.unwrap_or_else(|| self.base.saturating_mul(4).min(MOST))
    }

    pub(super) fn validate(&self, backup_trainers: u32) -> Result<(), TrainingError> {
        in_range("batch.base", self.base, 1, MOST, "32")?;
        in_range("batch.min", self.min, 1, MOST, "1")?;
        in_range("batch.max", self.most(), 1, MOST, "128")?;
        if !self.adaptive && (self.min != default_min() || self.max.is_some()) {
            return TrainingError::refuse(
                "batch",
                "min and max are the bounds of an adaptive batch",
                "remove them, or set adaptive to true",
            );
        }
        if self.adaptive && !(self.min..=self.most()).contains(&self.base) {
            return TrainingError::refuse(
                "batch",
                format!("base {} is not between min {} and max {}", self.base, self.min, self.most()),
                "write bounds around it, or remove them",
            );
        }
        if self.adaptive && backup_trainers > 0 {
            return TrainingError::refuse(
                "batch.adaptive",
                "backupTrainers leave a slow trainer's gradients out, adaptive gives it fewer examples",
                "remove one of the two",
            );
        }
        Ok(())
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self { base: default_base(), adaptive: false, min: default_min(), max: None }
    }
}

fn default_base() -> u32 {
    32
}
fn default_min() -> u32 {
    1
}
