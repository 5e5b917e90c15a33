//! References to modules and to their parameters.

use tch::Tensor;

use crate::error::RemoteError;
use crate::objects::{FromValues, RRef, Value, Values};

/// A module somewhere in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleRef(RRef);

impl ModuleRef {
    /// Takes a reference for one to a module; a call reports if it is something else.
    #[must_use]
    pub fn new(reference: RRef) -> Self {
        Self(reference)
    }

    #[must_use]
    pub fn rref(&self) -> &RRef {
        &self.0
    }

    /// Calls the module outside of any context: no gradients, evaluation mode, newest parameters.
    ///
    /// # Errors
    /// If the call or the module failed.
    pub fn evaluate(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let arguments = inputs.iter().map(|&tensor| Value::from(tensor)).collect();
        tensors(self.0.rpc_sync("forward", Values(arguments))?)
    }

    /// Returns the newest values of the parameters, in order.
    ///
    /// # Errors
    /// If the call failed.
    pub fn parameters(&self) -> Result<Vec<Tensor>, RemoteError> {
        tensors(self.0.rpc_sync("parameters", ())?)
    }

    /// Returns references to the parameters, for a [`DistributedOptimizer`](super::DistributedOptimizer).
    ///
    /// # Errors
    /// If the call failed.
    pub fn parameter_rrefs(&self) -> Result<Vec<ParameterRef>, RemoteError> {
        let (names, shapes): (Vec<String>, Vec<Vec<i64>>) = self.0.rpc_sync("describe", ())?;
        let rows = names.into_iter().zip(shapes).enumerate();
        Ok(rows.map(|(index, (name, shape))| ParameterRef { module: self.clone(), index, name, shape }).collect())
    }
}

fn tensors(values: Values) -> Result<Vec<Tensor>, RemoteError> {
    values.0.into_iter().map(|value| Tensor::from_values(vec![value])).collect()
}

/// One parameter of a module somewhere in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterRef {
    pub module: ModuleRef,
    /// Place among the module's parameters.
    pub index: usize,
    pub name: String,
    pub shape: Vec<i64>,
}
