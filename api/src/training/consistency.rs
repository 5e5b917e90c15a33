//! `spec.training.consistency` and `spec.training.staleness`: when a gradient takes effect, and how
//! strongly.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingError, in_range};

/// When a gradient takes effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.mode == 'Sync' || self.backupTrainers == 0",
        "message": "spec.training.consistency.backupTrainers is for Sync; remove it, or set mode to Sync",
    },
    {
        "rule": "!has(self.exactRecovery) || !self.exactRecovery || (self.mode == 'Sync' && self.backupTrainers == 0)",
        "message": "spec.training.consistency.exactRecovery is for Sync without backupTrainers, where a step has one result; remove it",
    },
    {
        "rule": "self.mode == 'Bounded' || self.staleness == 8",
        "message": "spec.training.consistency.staleness is the bound of Bounded; remove it, or set mode to Bounded",
    },
    {
        "rule": "self.mode != 'Sync' || !has(self.overlap) || !self.overlap",
        "message": "spec.training.consistency.overlap is for Async and Bounded, as in Sync no gradient is stale; remove it, or set mode to Async or Bounded",
    },
]))]
pub struct Consistency {
    /// Async (default): each gradient is applied when it arrives and answered at once, so a slow
    /// trainer delays no other. Bounded: as Async, but a trainer waits while it is more than
    /// `staleness` steps ahead of the slowest. Sync: a step is applied when the gradients of all
    /// trainers are in, as one mean, summed in the order of the trainers.
    #[serde(default)]
    pub mode: ConsistencyMode,
    /// Bounded only: steps that a trainer may be ahead of the slowest one. 0 keeps them in step.
    /// Default 8.
    #[serde(default = "default_staleness")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub staleness: u32,
    /// Sync only: how many of the trainers a step does not wait for (Chen et al., 2016). With 10
    /// trainers and 2 backup trainers a step is the mean of the first 8 gradients; the late ones are
    /// dropped and counted. Less than the number of trainers. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4095))]
    pub backup_trainers: u32,
    /// Sync only: a trainer that is replaced in the middle of a step computes that step again from the same parameters, so
    /// that the job ends with the same bits as one in which nothing failed. Servers keep each parameter's previous value
    /// for that, 4 bytes more for each, which takes a tenth of the exchange's speed, and a third over shared memory.
    /// Without it each gradient still counts once. Default: true for models of up to 16 million (2^24) parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_recovery: Option<bool>,
    /// Async and Bounded only: train on while an exchange is under way. A trainer gives its gradient to the servers, computes
    /// the next one with the parameters that it has, and takes those that come back before it gives that one. An exchange
    /// then costs no time up to the length of a step, and each gradient is one step staler, by an update of its own trainer and
    /// those of the others meanwhile, which the servers count. With local it is local.overlap instead. Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<bool>,
}

/// The consistency model; names as in the literature (Li et al., OSDI 2014).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConsistencyMode {
    /// Bulk synchronous: one update a step, the mean over all trainers.
    Sync,
    /// Stale synchronous (Ho et al., NIPS 2013): as Async with a bound on how far trainers drift apart.
    Bounded,
    /// Asynchronous: one update for each gradient, on arrival.
    #[default]
    Async,
}

/// What the learning rate does about a gradient's staleness: the updates its block got since the
/// trainer pulled it. Not with Sync, where nothing is stale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Staleness {
    /// None: nothing. Damped: the learning rate is divided by 1 + coefficient x staleness. Inverse: it is divided by the
    /// staleness (Zhang et al., IJCAI 2016), which lets dozens of asynchronous trainers use the learning rate of one.
    /// Default: Damped by 0.25 if each trainer has its own momentum, else Inverse; and None for the rows of sparse tables, of
    /// which trainers seldom read the same at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<StalenessPolicy>,
    /// Damped only: how strongly. Default 0.1.
    #[serde(default = "default_coefficient")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub coefficient: f64,
    /// SGD only: whose gradients a momentum is of. PerTrainer: each trainer's own; the trainer adds it to what it sends, with
    /// the look-ahead of Nesterov (DANA-Slim, Hakimi et al., 2019), which trains with more trainers than Shared can. Shared: all trainers'
    /// together, at the servers. Default: PerTrainer. The rows of sparse tables always have a momentum at the servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<StalenessMomentum>,
}

/// Whose gradients a momentum is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StalenessMomentum {
    /// Each trainer's own.
    PerTrainer,
    /// All trainers' together.
    Shared,
}

/// How the learning rate falls with staleness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StalenessPolicy {
    /// Not at all.
    None,
    /// lr / (1 + coefficient x staleness).
    Damped,
    /// lr / staleness, where that is above 1.
    Inverse,
}

/// What a server does with a gradient that holds NaN or infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NonFinite {
    /// The trainer gets an error that names it, the block and the step; nothing is applied.
    #[default]
    Refuse,
    /// That block's gradient is left out, counted, and training goes on.
    Skip,
    /// It is applied like any other.
    Pass,
}

impl Consistency {
    /// Returns whether a trainer computes a gradient while the exchange of the one before is under way.
    #[must_use]
    pub fn overlaps_exchanges(&self) -> bool {
        self.overlap.unwrap_or(false)
    }

    pub(super) fn validate(&self) -> Result<(), TrainingError> {
        in_range("consistency.staleness", self.staleness, 0, 1_000_000, "8")?;
        in_range("consistency.backupTrainers", self.backup_trainers, 0, 4095, "1")?;
        if self.mode != ConsistencyMode::Sync && self.backup_trainers > 0 {
            return TrainingError::refuse(
                "consistency.backupTrainers",
                "only Sync waits for trainers",
                "remove it, or set mode to Sync",
            );
        }
        if self.exact_recovery == Some(true) && (self.mode != ConsistencyMode::Sync || self.backup_trainers > 0) {
            return TrainingError::refuse(
                "consistency.exactRecovery",
                "only in Sync without backupTrainers a step has one result",
                "remove it",
            );
        }
        if self.overlaps_exchanges() && self.mode == ConsistencyMode::Sync {
            return TrainingError::refuse(
                "consistency.overlap",
                "in Sync no gradient is stale",
                "remove it, or set mode to Async or Bounded",
            );
        }
        if self.mode != ConsistencyMode::Bounded && self.staleness != default_staleness() {
            return TrainingError::refuse(
                "consistency.staleness",
                "only Bounded has a bound",
                "remove it, or set mode to Bounded",
            );
        }
        Ok(())
    }
}

impl Staleness {
    pub(super) fn validate(&self, mode: ConsistencyMode) -> Result<(), TrainingError> {
        in_range("staleness.coefficient", self.coefficient, 0.0, 1000.0, "0.1")?;
        if mode == ConsistencyMode::Sync && self.policy.is_some_and(|policy| policy != StalenessPolicy::None) {
            return TrainingError::refuse(
                "staleness.policy",
                "nothing is stale in Sync",
                "remove it, or set consistency.mode to Bounded or Async",
            );
        }
        if mode == ConsistencyMode::Sync && self.momentum.is_some() {
            return TrainingError::refuse(
                "staleness.momentum",
                "in Sync there is one momentum, of the mean of the trainers' gradients",
                "remove it, or set consistency.mode to Bounded or Async",
            );
        }
        Ok(())
    }
}

impl Default for Consistency {
    fn default() -> Self {
        Self {
            mode: ConsistencyMode::default(),
            staleness: default_staleness(),
            backup_trainers: 0,
            exact_recovery: None,
            overlap: None,
        }
    }
}

impl Default for Staleness {
    fn default() -> Self {
        Self { policy: None, coefficient: default_coefficient(), momentum: None }
    }
}

fn default_staleness() -> u32 {
    8
}
fn default_coefficient() -> f64 {
    0.1
}
