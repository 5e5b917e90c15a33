//! Answers calls of hosted modules, and records those that belong to a context.

use std::sync::Arc;

use tch::Tensor;

use super::context::Context;
use super::module::{HostedModule, Module, Pass};
use super::module_ref::ModuleRef;
use super::parameters::{Parameters, leaf};
use crate::error::{RemoteError, unknown_module_method};
use crate::ids::ObjectId;
use crate::objects::{
    Answer, Call, ContextState, Endpoint, FromValues, Hosted, IntoValues, Job, Piece, Registry, Value, on_pool,
};

impl Endpoint {
    /// Hosts a module in this process. Its pieces of a context's graph are not cut out of the local one.
    #[must_use]
    pub fn module(&self, module: impl Module, parameters: Parameters) -> ModuleRef {
        ModuleRef::new(self.adopt("local".into(), Arc::new(HostedModule::new(module, parameters))))
    }
}

impl Registry {
    /// Offers a type of modules. A module's calls run side by side.
    pub fn module<A: FromValues, M: Module>(
        &mut self,
        name: &str,
        constructor: impl Fn(&Call, A) -> Result<(M, Parameters), RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        self.constructor(name, move |call, arguments| {
            let (module, parameters) = constructor(call, A::from_values(arguments)?)?;
            Ok(Arc::new(HostedModule::new(module, parameters)))
        })
    }
}

impl Hosted for HostedModule {
    fn call(self: Arc<Self>, job: Job) {
        let Job { call, object, method, arguments, responder, .. } = job;
        on_pool(call, responder, move |call| self.answer(call, object, &method, arguments));
    }
}

impl ContextState {
    /// Runs a module on inputs from another process and keeps the piece. The outputs are cut from it.
    pub fn record(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        id: ObjectId,
        module: &HostedModule,
        inputs: Vec<Tensor>,
    ) -> Result<(u64, Vec<Tensor>), RemoteError> {
        let version = self.pin(id, || module.current());
        let context = Context::part_of(endpoint.clone(), Arc::clone(self));
        let outputs = module.forward(&Pass::new(Some(&context)), &version.tensors, &inputs)?;
        let mut tape = context.into_tape();
        tape.modules.insert(id);
        let cut = outputs.iter().map(|t| if t.requires_grad() { leaf(t) } else { t.detach() }).collect();
        Ok((self.add_piece(Piece { inputs, outputs, tape }), cut))
    }
}

impl HostedModule {
    /// Answers a call.
    fn answer(&self, call: &Call, id: ObjectId, method: &str, arguments: Vec<Value>) -> Result<Answer, RemoteError> {
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
        let version =
            || call.context.as_ref().map_or_else(|| self.current(), |context| context.pin(id, || self.current()));
        let values = match method {
            "parameters" => version().tensors.iter().map(|tensor| Value::Tensor(tensor.detach())).collect(),
            "version" => i64::try_from(version().number).unwrap_or(i64::MAX).into_values(),
            "describe" => {
                let shapes = version().tensors.iter().map(Tensor::size).collect::<Vec<_>>();
                (self.names().iter().map(String::as_str).collect::<Vec<_>>(), shapes).into_values()
            }
            "gradients" => {
                let context = call.context.as_ref().ok_or_else(|| RemoteError::new("gradients belong to a context"))?;
                context.pin(id, || self.current());
                context.gradients(id).into_iter().map(Value::from).collect()
            }
            other => return Err(unknown_module_method(other)),
        };
        Ok(Answer { values, piece: 0 })
    }
}
