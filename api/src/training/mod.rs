//! `spec.training`: what every process of a job must agree on. The operator and `psjobs run` hand
//! it to servers and trainers as JSON in `PSJOB_TRAINING`; flags can override single values when a
//! role is started by hand.

mod batch;
mod compression;
mod consistency;
mod local;
mod optimizer;
mod precision;
mod schedule;

use std::fmt::Display;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use batch::Batch;
pub use compression::{Codec, Compression};
pub use consistency::{Consistency, ConsistencyMode, NonFinite, Staleness, StalenessMomentum, StalenessPolicy};
pub use local::Local;
pub use optimizer::{Optimizer, OptimizerGroup, OptimizerKind};
pub use precision::{Autocast, Precision};
pub use schedule::{Schedule, ScheduleKind};

/// How the job trains: consistency, optimizer, batch size and seed. Every process of the job gets
/// the same values. Example: `{consistency: {mode: Sync}, optimizer: {type: Adam, learningRate: 0.001}}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Training {
    /// When a server applies a gradient and answers the trainer.
    #[serde(default)]
    pub consistency: Consistency,
    /// The rule that turns gradients into parameter updates. It runs on the servers; with `local` on the trainers.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Steps that trainers make alone between two exchanges. Default: they exchange in every step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<Local>,
    /// The learning rate over time.
    #[serde(default)]
    pub schedule: Schedule,
    /// What the learning rate does about stale gradients.
    #[serde(default)]
    pub staleness: Staleness,
    /// How gradients and parameters are coded on the network.
    #[serde(default)]
    pub compression: Compression,
    /// What a server does with a gradient that holds NaN or infinity: Refuse (default) ends the
    /// trainer with an error, Skip leaves it out, Pass applies it.
    #[serde(default)]
    pub non_finite: NonFinite,
    /// How many examples a trainer reads in one step.
    #[serde(default)]
    pub batch: Batch,
    /// The floating-point types in which a workload in Rust computes. Default: f32, and libtorch's own settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Seed of the initial parameters, of the shuffling of the data and of dropout. Two Sync runs
    /// with one seed give equal parameters. Default 1.
    #[serde(default = "default_seed")]
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub seed: u64,
}

/// A value of `spec.training` that cannot work; the text names the field and what to write.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("spec.training.{field}: {problem}; {advice}")]
pub struct TrainingError {
    field: &'static str,
    problem: String,
    advice: String,
}

impl Training {
    /// Checks the ranges that the schema states and the rules between fields, for values that
    /// reach a process without passing an API server.
    ///
    /// # Errors
    /// The first field that cannot work.
    pub fn validate(&self) -> Result<(), TrainingError> {
        self.consistency.validate()?;
        self.optimizer.validate()?;
        self.local.as_ref().map_or(Ok(()), Local::validate)?;
        self.schedule.validate()?;
        self.staleness.validate(self.consistency.mode)?;
        self.compression.validate()?;
        self.batch.validate(self.consistency.backup_trainers)?;
        if self.staleness.momentum.is_some() && self.optimizer.kind != OptimizerKind::Sgd {
            return TrainingError::refuse(
                "staleness.momentum",
                "only SGD can have its momentum at the trainers",
                "remove it, or set optimizer.type to SGD",
            );
        }
        if self.staleness.momentum.is_some() && self.local.is_some() {
            return TrainingError::refuse(
                "staleness.momentum",
                "with local trainers have their whole optimizer, and local.momentum is the servers'",
                "remove it",
            );
        }
        if self.local.is_some() && self.consistency.overlaps_exchanges() {
            return TrainingError::refuse(
                "consistency.overlap",
                "it is for trainers that exchange in every step, and with local they make steps alone",
                "remove it, or write local.overlap instead",
            );
        }
        if self.local.is_some() && self.batch.adaptive {
            return TrainingError::refuse(
                "batch.adaptive",
                "it deals out the examples of each step, and with local trainers make their steps alone",
                "remove one of the two",
            );
        }
        Ok(())
    }

    /// Returns whether each trainer keeps a momentum of its own gradients.
    #[must_use]
    pub fn has_momentum_per_trainer(&self) -> bool {
        self.consistency.mode != ConsistencyMode::Sync
            && self.local.is_none()
            && (self.optimizer.kind, self.optimizer.momentum > 0.0) == (OptimizerKind::Sgd, true)
            && self.staleness.momentum != Some(StalenessMomentum::Shared)
    }

    /// Returns whether a trainer computes on while an exchange is under way, of a gradient or of what local steps have changed.
    #[must_use]
    pub fn overlaps_exchanges(&self) -> bool {
        self.local.as_ref().map_or(self.consistency.overlaps_exchanges(), |local| local.overlap)
    }

    /// Returns the types in which trainers compute.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision.unwrap_or_default()
    }

    /// Returns the steps that a trainer makes alone for one exchange; 0 if it exchanges in every step.
    #[must_use]
    pub fn local_steps(&self) -> u32 {
        self.local.as_ref().map_or(0, |local| local.steps)
    }

    /// Returns the steps that a trainer makes for one exchange with the servers: 1 unless it trains alone in between.
    #[must_use]
    pub fn steps_per_exchange(&self) -> u64 {
        self.local.as_ref().map_or(1, |local| local.steps.max(1).into())
    }
}

impl TrainingError {
    /// `advice` says what to write instead.
    fn refuse<T>(field: &'static str, problem: impl Into<String>, advice: impl Into<String>) -> Result<T, Self> {
        Err(Self { field, problem: problem.into(), advice: advice.into() })
    }
}

/// Refuses a number that is not from `low` to `high`, or not a number at all.
fn in_range<T: PartialOrd + Display>(
    field: &'static str,
    value: T,
    low: T,
    high: T,
    example: &str,
) -> Result<(), TrainingError> {
    if (&low..=&high).contains(&&value) {
        return Ok(());
    }
    let advice = format!("write a number from {low} to {high}, for example {example}");
    TrainingError::refuse(field, format!("{value} is out of range"), advice)
}

fn default_seed() -> u64 {
    1
}

impl Default for Training {
    fn default() -> Self {
        Self {
            consistency: Consistency::default(),
            optimizer: Optimizer::default(),
            local: None,
            schedule: Schedule::default(),
            staleness: Staleness::default(),
            compression: Compression::default(),
            non_finite: NonFinite::default(),
            batch: Batch::default(),
            precision: None,
            seed: default_seed(),
        }
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
            (r#"{"batch":{"base":0}}"#, "batch.base"),
            (r#"{"batch":{"min":4}}"#, "batch"),
            (r#"{"batch":{"base":8,"adaptive":true,"max":4}}"#, "batch"),
            (r#"{"batch":{"microBatches":0}}"#, "batch.microBatches"),
            (r#"{"batch":{"base":32,"microBatches":5}}"#, "batch.microBatches"),
            (r#"{"batch":{"base":2,"microBatches":4}}"#, "batch.microBatches"),
            (r#"{"batch":{"adaptive":true},"consistency":{"mode":"Sync","backupTrainers":1}}"#, "batch.adaptive"),
            (r#"{"consistency":{"mode":"Async","backupTrainers":1}}"#, "consistency.backupTrainers"),
            (r#"{"consistency":{"mode":"Async","exactRecovery":true}}"#, "consistency.exactRecovery"),
            (r#"{"consistency":{"mode":"Sync","backupTrainers":1,"exactRecovery":true}}"#, "consistency.exactRecovery"),
            (r#"{"consistency":{"mode":"Sync","staleness":3}}"#, "consistency.staleness"),
            (r#"{"consistency":{"mode":"Sync","overlap":true}}"#, "consistency.overlap"),
            (r#"{"consistency":{"overlap":true},"local":{"steps":8}}"#, "consistency.overlap"),
            (r#"{"consistency":{"mode":"Sync"},"staleness":{"policy":"Damped"}}"#, "staleness.policy"),
            (r#"{"local":{"steps":0}}"#, "local.steps"),
            (r#"{"local":{"steps":8,"momentum":2}}"#, "local.momentum"),
            (r#"{"local":{"steps":8},"batch":{"adaptive":true}}"#, "batch.adaptive"),
            (r#"{"schedule":{"type":"Cosine"}}"#, "schedule.totalSteps"),
            (r#"{"compression":{"codec":"BF16","density":0.5}}"#, "compression.density"),
        ];
        for (json, field) in rows {
            let training: Training = serde_json::from_str(json).expect("parses");
            let error = training.validate().expect_err(json).to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
    }

    #[test]
    fn exchanges_overlap_where_the_job_says_so_each_kind_by_its_own_field() {
        for (json, overlaps) in [
            ("{}", false),
            (r#"{"consistency":{"overlap":true}}"#, true),
            (r#"{"consistency":{"mode":"Bounded","overlap":true}}"#, true),
            (r#"{"consistency":{"mode":"Sync","overlap":false}}"#, false),
            (r#"{"local":{"steps":8}}"#, false),
            (r#"{"local":{"steps":8,"overlap":true}}"#, true),
        ] {
            let training: Training = serde_json::from_str(json).expect("parses");
            training.validate().expect(json);
            assert_eq!(training.overlaps_exchanges(), overlaps, "{json}");
        }
    }

    #[test]
    fn fields_that_are_not_set_are_not_written_so_that_older_workers_read_the_rest() {
        let json = serde_json::to_string(&Training::default()).expect("serializes");
        assert!(!json.contains("microBatches") && !json.contains("precision"), "{json}");
        let given = r#"{"batch":{"microBatches":4},"precision":{"autocast":"BF16","tf32":true}}"#;
        let training: Training = serde_json::from_str(given).expect("parses");
        training.validate().expect("4 divides 32");
        assert_eq!(training.batch.micro_batches(), 4);
        assert_eq!(training.precision(), Precision { autocast: Autocast::BF16, tf32: Some(true) });
        let json = serde_json::to_string(&training).expect("serializes");
        assert_eq!(serde_json::from_str::<Training>(&json).expect("parses"), training);
    }

    #[test]
    fn unknown_fields_are_refused() {
        let error = serde_json::from_str::<Training>(r#"{"optimiser":{}}"#).expect_err("typo");
        assert!(error.to_string().contains("optimiser"), "{error}");
    }
}
