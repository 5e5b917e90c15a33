//! The initial parameters of modules.

use tch::Tensor;

/// The initial parameters of a module, in order. These values are version 0.
#[derive(Debug, Default)]
pub struct Parameters {
    pub(super) names: Vec<String>,
    pub(super) tensors: Vec<Tensor>,
}

impl Parameters {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn with(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.names.push(name.into());
        self.tensors.push(leaf(&tensor));
        self
    }

    /// Returns the tensors, for use outside of a hosted module.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// Returns the same values as the start of a graph.
pub(super) fn leaf(tensor: &Tensor) -> Tensor {
    tensor.detach().set_requires_grad(true)
}
