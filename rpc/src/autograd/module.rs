//! Modules as their owner has them: a function, and the versions of its parameters.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use super::super::error::unknown_module_method;
use super::super::link::Answer;
use super::super::lock::lock;
use super::super::object::Call;
use super::super::object_table::ObjectId;
use super::super::{FromValues, IntoValues, RemoteError, Value};
use super::{Context, ContextState, ModuleRef};

/// A differentiable function. Its parameters are not inside: the process that hosts it keeps them, in
/// versions, and hands it those of the context that calls.
pub trait Module: Send + Sync + 'static {
    /// `parameters` are in the order of [`Parameters`]; `inputs` are as the caller passed them.
    ///
    /// # Errors
    /// Whatever it cannot do with the inputs. A panic inside is an error too.
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError>;
}

/// How a module is being called.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    context: Option<&'a Context>,
}

impl<'a> Pass<'a> {
    /// Describes a call that `context` records, or one that is not recorded.
    #[must_use]
    pub fn new(context: Option<&'a Context>) -> Self {
        Self { context }
    }

    /// True if a context records the call: layers like dropout are active. False: evaluation.
    #[must_use]
    pub fn train(&self) -> bool {
        self.context.is_some()
    }

    /// Calls another module, here or elsewhere, as part of this one.
    ///
    /// # Errors
    /// What went wrong with the call.
    pub fn forward(&self, module: &ModuleRef, inputs: &[&Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        match self.context {
            Some(context) => context.forward(module, inputs),
            None => module.evaluate(inputs),
        }
    }
}

/// The initial parameters of a module, in order. Each begins its life as version 0.
#[derive(Debug, Default)]
pub struct Parameters {
    names: Vec<String>,
    tensors: Vec<Tensor>,
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

    /// The tensors, for use without a host.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// The values of a module's parameters after `number` steps.
#[derive(Debug)]
pub(crate) struct Version {
    pub number: u64,
    pub tensors: Vec<Tensor>,
}

impl Version {
    pub fn share(&self) -> Self {
        Self { number: self.number, tensors: share(&self.tensors) }
    }
}

pub(crate) fn share(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

/// The same values as the start of a graph.
pub(crate) fn leaf(tensor: &Tensor) -> Tensor {
    tensor.detach().set_requires_grad(true)
}

pub(crate) struct HostedModule {
    module: Box<dyn Module>,
    names: Vec<String>,
    current: Mutex<Version>,
}

impl HostedModule {
    pub fn new(module: impl Module, parameters: Parameters) -> Self {
        let current = Mutex::new(Version { number: 0, tensors: parameters.tensors });
        Self { module: Box::new(module), names: parameters.names, current }
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub fn current(&self) -> Version {
        lock(&self.current).share()
    }

    pub fn forward(
        &self,
        pass: &Pass<'_>,
        parameters: &[Tensor],
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RemoteError> {
        self.module.forward(pass, parameters, inputs)
    }

    /// Makes the next version: `change` gives new values for some of the parameters, in order.
    pub fn step(
        &self,
        change: impl FnOnce(&[Tensor]) -> Result<Vec<Option<Tensor>>, RemoteError>,
    ) -> Result<u64, RemoteError> {
        let mut current = lock(&self.current);
        let changed = change(&current.tensors)?;
        for (tensor, new) in current.tensors.iter_mut().zip(changed) {
            if let Some(new) = new {
                *tensor = leaf(&new);
            }
        }
        current.number += 1;
        Ok(current.number)
    }

    /// Answers a call from another process.
    pub fn call(
        self: &Arc<Self>,
        call: &Call,
        id: ObjectId,
        method: &str,
        arguments: Vec<Value>,
    ) -> Result<Answer, RemoteError> {
        if method == "forward" {
            let inputs = arguments.into_iter().map(|value| <Tensor>::from_values(vec![value]));
            let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
            let (piece, outputs) = match &call.context {
                Some(context) => ContextState::record(context, &call.endpoint, id, self, inputs)?,
                None => (0, tch::no_grad(|| self.forward(&Pass::new(None), &self.current().tensors, &inputs))?),
            };
            return Ok(Answer { values: outputs.into_iter().map(Value::Tensor).collect(), piece });
        }
        <()>::from_values(arguments)?;
        let version = || call.context.as_ref().map_or_else(|| self.current(), |context| context.pin(id, self));
        let values = match method {
            "parameters" => version().tensors.iter().map(|tensor| Value::Tensor(tensor.detach())).collect(),
            "version" => i64::try_from(version().number).unwrap_or(i64::MAX).into_values(),
            "describe" => {
                let shapes = version().tensors.iter().map(Tensor::size).collect::<Vec<_>>();
                (self.names.iter().map(String::as_str).collect::<Vec<_>>(), shapes).into_values()
            }
            "gradients" => {
                let context = call.context.as_ref().ok_or_else(|| RemoteError::new("gradients belong to a context"))?;
                context.pin(id, self);
                context.gradients(id).into_iter().map(Value::from).collect()
            }
            other => return Err(unknown_module_method(other)),
        };
        Ok(Answer { values, piece: 0 })
    }
}

impl std::fmt::Debug for HostedModule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostedModule").field("names", &self.names).finish_non_exhaustive()
    }
}
