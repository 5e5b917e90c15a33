//! `spec.training.compression`: how blocks are coded on the network.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingError, in_range};

/// How blocks are coded on the network. What a lossy codec leaves out of a gradient is added to the
/// trainer's next one. Trainers on a server's own host use shared memory, and no codec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.codec == 'TopK' || self.density == 0.01",
        "message": "spec.training.compression.density is for TopK; remove it, or set codec to TopK",
    },
]))]
pub struct Compression {
    /// Codec of gradients: F32 (default) as they are; BF16 and FP16 half the bytes; INT8 a quarter;
    /// OneBit a sign for each element; TopK only the largest elements.
    #[serde(default)]
    pub codec: Codec,
    /// TopK only: share of the elements that is sent, above 0 and at most 1. Default 0.01.
    #[serde(default = "default_density")]
    #[schemars(range(min = 0.000_001, max = 1.0))]
    pub density: f64,
}

/// Names of the codecs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Codec {
    /// 4 bytes an element, exact. Parameters come back as F32.
    #[default]
    F32,
    /// 2 bytes: the upper half of an f32. With this and all codecs below, parameters come back as
    /// BF16; the servers keep them in F32.
    BF16,
    /// 2 bytes: half precision.
    FP16,
    /// 1.02 bytes: a scale for each 256 elements.
    INT8,
    /// 0.14 bytes: two means for each 512 elements.
    OneBit,
    /// 8 bytes for each element sent.
    TopK,
}

impl Compression {
    pub(super) fn validate(&self) -> Result<(), TrainingError> {
        in_range("compression.density", self.density, 0.000_001, 1.0, "0.01")?;
        if self.codec != Codec::TopK && self.density != default_density() {
            return TrainingError::refuse(
                "compression.density",
                "only TopK leaves elements out",
                "remove it, or set codec to TopK",
            );
        }
        Ok(())
    }
}

impl Default for Compression {
    fn default() -> Self {
        Self { codec: Codec::default(), density: default_density() }
    }
}

fn default_density() -> f64 {
    0.01
}
