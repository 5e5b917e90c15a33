//! `spec.training.precision`: the floating-point types in which a trainer computes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The types in which a workload in Rust computes the model. Parameters, and gradients on their way to the servers, stay f32.
/// A Python script chooses its own. Example: `{autocast: BF16, tf32: true}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Precision {
    /// BF16: the loss is computed under libtorch's autocast, which multiplies matrices and convolves in bf16, on CPUs and GPUs, and
    /// leaves in f32 what needs it. Evaluations stay in f32. None (default): all in f32.
    #[serde(default)]
    pub autocast: Autocast,
    /// true: a GPU multiplies matrices of f32, and convolves, in TF32, whose fractions have 10 bits instead of 23; false: it does
    /// neither. It means nothing on a CPU. Default: as libtorch has it, which convolves in TF32 and does not multiply in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tf32: Option<bool>,
}

/// The type that autocast computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Autocast {
    /// No autocast.
    #[default]
    None,
    /// 16 bits, with the exponent of f32: it needs no scaling of the loss.
    BF16,
}
