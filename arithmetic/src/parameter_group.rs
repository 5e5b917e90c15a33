//! Parameter groups: elements that the optimizer treats otherwise than `spec.training.optimizer` says, as those of
//! `torch.optim.Optimizer.param_groups`, and where they lie in a block.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Differences in how the optimizer treats one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParameterGroup {
    /// Factor on the job's learning rate, whose schedule holds for all groups.
    pub learning_rate_factor: f64,
    /// Replaces the job's weight decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

impl Default for ParameterGroup {
    fn default() -> Self {
        Self { learning_rate_factor: 1.0, weight_decay: None }
    }
}

impl ParameterGroup {
    /// Returns whether the tensor is treated as the job says.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Neighbouring elements of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    /// Places in the flat space, or in a block.
    pub range: Range<usize>,
    /// The group of all of them.
    pub group: ParameterGroup,
}

/// Returns the part of `stretches` that lies in `block`, counted from its beginning.
#[must_use]
pub fn within(stretches: &[Stretch], block: &Range<usize>) -> Vec<Stretch> {
    let first = stretches.partition_point(|stretch| stretch.range.end <= block.start);
    let inside = stretches[first..].iter().take_while(|stretch| stretch.range.start < block.end);
    inside
        .map(|Stretch { range, group }| {
            let (start, end) = (range.start.max(block.start), range.end.min(block.end));
            Stretch { range: start - block.start..end - block.start, group: *group }
        })
        .collect()
}
