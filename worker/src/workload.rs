//! The interface of a workload: a model, its data and its loss. The training loop knows nothing else about it.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{TchError, Tensor, nn};

use crate::data::Dataset;

/// Metrics by name, for instance `accuracy`.
pub type Metrics = BTreeMap<String, f64>;

/// A model with the data to train it on. The trainers of a job each have one, with the same
/// examples in the same order; the loop assigns to each those that it reads.
pub trait Workload {
    /// The network; its parameters live in the store that [`Workload::model`] got.
    type Model;
    /// The training set.
    type Data: Dataset + Send + 'static;

    /// The training set, for the thread that reads it; asked for more than once. Tensors share their
    /// memory when they are cloned with `shallow_clone`.
    fn training_set(&self) -> Self::Data;

    /// Creates the model, on the CPU. Every trainer calls this with the same seed set, so that all begin
    /// with the same values.
    fn model(&self, path: &nn::Path) -> Self::Model;

    /// Mean loss over a batch, a scalar to differentiate.
    fn loss(&self, model: &Self::Model, batch: <Self::Data as Dataset>::Batch) -> Tensor;

    /// Metrics of the model on data that it was not trained on. Gradients are off.
    fn evaluate(&self, model: &Self::Model) -> Metrics;

    /// Writes the trained model. Unless said otherwise, its tensors by name: as safetensors where `file`
    /// ends so, else in libtorch's format.
    ///
    /// # Errors
    /// If the file cannot be written.
    fn save(&self, model: &Self::Model, store: &nn::VarStore, file: &Path) -> Result<(), TchError> {
        let _ = model;
        store.save(file)
    }
}
