//! What is trained: a model, its data and its loss. The training loop knows nothing else about it.

pub mod digits;

use std::collections::BTreeMap;

use tch::{Tensor, nn};

/// Metrics by name, for instance `accuracy`.
pub type Metrics = BTreeMap<String, f64>;

/// A model with the data to train it on. The trainers of a job each have one, with the same
/// examples in the same order; the loop tells each which of them to read.
pub trait Workload {
    /// The network; its parameters live in the store that [`Workload::model`] got.
    type Model;

    /// Number of training examples.
    fn examples(&self) -> usize;

    /// Creates the model. Every trainer calls this with the same seed set, so that all begin with the
    /// same values.
    fn model(&self, path: &nn::Path) -> Self::Model;

    /// Mean loss over the training examples named, a scalar to differentiate.
    fn loss(&self, model: &Self::Model, batch: &[i64]) -> Tensor;

    /// Metrics of the trained model on data that it was not trained on. Gradients are off.
    fn evaluate(&self, model: &Self::Model) -> Metrics;
}
