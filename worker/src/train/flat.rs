//! A model's trainable tensors as one flat space: one behind the other, in the order in which the model made them, so that
//! every trainer of a job sees the same element at the same place. Most models make their layers in the order in which they
//! compute them: then backward() completes the gradients from the end of the space to its beginning.

use std::collections::HashMap;
use std::ops::Range;

use psjobs_ps::client::TensorSpec;
use tch::{Kind, TchError, Tensor, nn, no_grad};

/// One tensor and its place. The tensor is the model's own, not a copy.
#[derive(Debug)]
pub struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    /// Its elements in the flat space.
    pub range: Range<usize>,
}

/// All trainable tensors of a model, f32.
#[derive(Debug)]
pub struct Flat {
    parameters: Vec<Parameter>,
    elements: usize,
}

impl Flat {
    /// The trainable variables of `store`.
    ///
    /// # Panics
    /// If one is not f32: servers keep master values in f32.
    #[must_use]
    pub fn of(store: &nn::VarStore) -> Self {
        // The store lists tensors in order, without names, and names without order. Empty tensors share an address, and
        // their order does not count.
        let made = store.trainable_variables();
        let order: HashMap<_, _> = made.iter().map(Tensor::data_ptr).zip(0..).collect();
        let mut variables: Vec<(String, Tensor)> =
            store.variables().into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect();
        variables.sort_by_cached_key(|(name, tensor)| {
            (order.get(&tensor.data_ptr()).copied().unwrap_or(usize::MAX), name.clone())
        });
        let mut elements = 0;
        let place = |(name, tensor): (String, Tensor)| {
            assert_eq!(tensor.kind(), Kind::Float, "parameter {name}");
            let range = elements..elements + tensor.numel();
            elements = range.end;
            Parameter { name, tensor, range }
        };
        let parameters = variables.into_iter().map(place).collect();
        Self { parameters, elements }
    }

    /// Returns a second handle to every tensor, for another owner.
    pub(super) fn shallow_clone(&self) -> Self {
        let parameters = self.parameters.iter().map(|parameter| Parameter {
            name: parameter.name.clone(),
            tensor: parameter.tensor.shallow_clone(),
            range: parameter.range.clone(),
        });
        Self { parameters: parameters.collect(), elements: self.elements }
    }

    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub(super) fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Names and shapes, in order.
    #[must_use]
    pub fn specs(&self) -> Vec<TensorSpec> {
        let shape = |tensor: &Tensor| tensor.size().into_iter().map(|size| size as u64).collect();
        self.parameters.iter().map(|p| TensorSpec::new(p.name.clone(), shape(&p.tensor))).collect()
    }

    /// A copy of the current values.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.elements];
        for parameter in &self.parameters {
            parameter.tensor.copy_data(&mut values[parameter.range.clone()], parameter.range.len());
        }
        values
    }

    /// Gives every parameter its part of `values`.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn set(&mut self, values: &[f32]) {
        assert_eq!(values.len(), self.elements, "elements of the values and of the model");
        no_grad(|| {
            for parameter in &mut self.parameters {
                let value = Tensor::from_slice(&values[parameter.range.clone()]);
                parameter.tensor.copy_(&value.view_as(&parameter.tensor));
            }
        });
    }

    /// The gradient of `loss` by every parameter, in order; undefined where it does not depend on one.
    ///
    /// # Errors
    /// If libtorch cannot compute them.
    pub fn gradients(&self, loss: &Tensor) -> Result<Vec<Tensor>, TchError> {
        let parameters: Vec<&Tensor> = self.parameters.iter().map(|p| &p.tensor).collect();
        Tensor::f_run_backward(&[loss], &parameters, false, false)
    }
}
