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
    {
        "rule": "!has(self.microBatches) || self.microBatches < 1 || self.base % self.microBatches == 0",
        "message": "spec.training.batch.base must be a multiple of microBatches, which have one size; write a number of micro-batches that divides base",
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
    /// Compute the gradient of a step in so many micro-batches of base / microBatches examples, one after the other, and add
    /// them up (gradient accumulation). Activations then take the memory of one micro-batch. Steps, learning rate and what is
    /// read stay as they are, and so do results up to rounding, but for models whose forward draws numbers or looks at the whole
    /// batch, as dropout and batch norm do. It must divide base. For workloads in Rust; a Python script calls backward() for
    /// each part itself. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub micro_batches: Option<u32>,
}

impl Batch {
    /// The most examples that a trainer reads in a step of an adaptive job.
    #[must_use]
    pub fn most(&self) -> u32 {
        self.max.unwrap_or_else(|| self.base.saturating_mul(4).min(MOST))
    }

    /// The micro-batches in which a trainer computes the gradient of a step of `base` examples.
    #[must_use]
    pub fn micro_batches(&self) -> u32 {
        self.micro_batches.unwrap_or(1)
    }

    pub(super) fn validate(&self, backup_trainers: u32) -> Result<(), TrainingError> {
        in_range("batch.base", self.base, 1, MOST, "32")?;
        in_range("batch.min", self.min, 1, MOST, "1")?;
        in_range("batch.max", self.most(), 1, MOST, "128")?;
        in_range("batch.microBatches", self.micro_batches(), 1, MOST, "4")?;
        if !self.base.is_multiple_of(self.micro_batches()) {
            return TrainingError::refuse(
                "batch.microBatches",
                format!("base {} has no {} micro-batches of one size", self.base, self.micro_batches()),
                "write a number that divides base",
            );
        }
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
        Self { base: default_base(), adaptive: false, min: default_min(), max: None, micro_batches: None }
    }
}

fn default_base() -> u32 {
    32
}
fn default_min() -> u32 {
    1
}
