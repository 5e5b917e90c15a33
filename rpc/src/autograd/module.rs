//! Modules, the versions of their parameters, and calls of modules within a context.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::Tensor;

use super::context::Context;
use super::module_ref::ModuleRef;
use super::parameters::{Parameters, leaf};
use crate::error::RemoteError;
use crate::objects::{FromValues, RemoteCall, Value, Version};

/// A differentiable function. Its parameters are not inside: the process that hosts it keeps them, in
/// versions, and hands it those of the context that calls.
pub trait Module: Send + Sync + 'static {
    /// `parameters` are in the order of [`Parameters`]; `inputs` are as the caller passed them.
    ///
    /// # Errors
    /// Whatever it cannot do with the inputs. A panic inside is an error too.
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError>;
}

/// The circumstances in which a module is called.
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

    /// Returns true if a context records the call: layers like dropout are active. False: evaluation.
    #[must_use]
    pub fn train(&self) -> bool {
        self.context.is_some()
    }

    /// Calls another module, here or elsewhere, as part of this one.
    ///
    /// # Errors
    /// If the call failed.
    pub fn forward(&self, module: &ModuleRef, inputs: &[&Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        match self.context {
            Some(context) => context.forward(module, inputs),
            None => module.evaluate(inputs),
        }
    }
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

    /// Returns the module behind a hosted object, if it is one.
    pub fn of(hosted: Arc<dyn Any + Send + Sync>) -> Option<Arc<Self>> {
        hosted.downcast().ok()
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub fn current(&self) -> Version {
        self.current.lock().share()
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
        let mut current = self.current.lock();
        let changed = change(&current.tensors)?;
        for (tensor, new) in current.tensors.iter_mut().zip(changed) {
            if let Some(new) = new {
                *tensor = leaf(&new);
            }
        }
        current.number += 1;
        Ok(current.number)
    }
}

impl Context {
    /// Calls a module. Inputs may be the outputs of other calls: gradients find their way through both.
    ///
    /// # Errors
    /// If the call or the module failed.
    pub fn forward(&self, module: &ModuleRef, inputs: &[&Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let reference = module.rref();
        if reference.is_local() {
            let (_, hosted) = self.endpoint.shared().objects.find(reference.id())?;
            let hosted = HostedModule::of(hosted).ok_or_else(|| not_a_module(module))?;
            let version = self.state.pin(reference.id(), || hosted.current());
            self.tape.lock().modules.insert(reference.id());
            let inputs: Vec<_> = inputs.iter().map(|t| t.shallow_clone()).collect();
            return hosted.forward(&Pass::new(Some(self)), &version.tensors, &inputs);
        }
        let arguments = inputs.iter().map(|&tensor| Value::from(tensor)).collect();
        let answer = self.call(module, "forward", arguments)?.wait()?;
        let outputs = answer.values.into_iter().map(|value| Tensor::from_values(vec![value]));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        self.tape.lock().calls.push(RemoteCall {
            module: reference.clone(),
            piece: answer.piece,
            inputs: inputs.iter().map(|t| t.shallow_clone()).collect(),
            outputs: outputs.iter().map(Tensor::shallow_clone).collect(),
        });
        Ok(outputs)
    }
}

fn not_a_module(module: &ModuleRef) -> RemoteError {
    RemoteError::new(format!("{} is not a module", module.rref()))
}
