//! The handle that records.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use super::super::lock::lock;
use super::super::object_table::Hosted;
use super::super::{Endpoint, FromValues, RemoteError, Value};
use super::contexts::ContextState;
use super::tape::{RemoteCall, Tape};
use super::{ModuleRef, Pass};

/// Records calls of modules, takes them backwards, and keeps their gradients apart from those of
/// other contexts. Dropped, it is freed in all processes that it touched; so it is when this process
/// dies and its lease ends.
#[derive(Debug)]
pub struct Context {
    endpoint: Endpoint,
    state: Arc<ContextState>,
    /// The calls from this process's own stretch of the graph.
    tape: Mutex<Tape>,
    /// True for the context that a trainer opened, false for its continuation in another process.
    root: bool,
}

impl Context {
    #[must_use]
    pub fn new(endpoint: &Endpoint) -> Self {
        // 0 means "no context" on the wire.
        let id = rand::random_range(1..u64::MAX);
        let state = endpoint.shared().contexts.open(id, endpoint.shared().session);
        Self { endpoint: endpoint.clone(), state, tape: Mutex::default(), root: true }
    }

    pub(crate) fn part_of(endpoint: Endpoint, state: Arc<ContextState>) -> Self {
        Self { endpoint, state, tape: Mutex::default(), root: false }
    }

    pub(crate) fn into_tape(self) -> Tape {
        std::mem::take(&mut *lock(&self.tape))
    }

    /// Calls a module. Inputs may be the outputs of other calls: gradients find their way through both.
    ///
    /// # Errors
    /// What went wrong with the call, also inside the module.
    pub fn forward(&self, module: &ModuleRef, inputs: &[&Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let reference = module.rref();
        if reference.is_local() {
            let (_, hosted) = self.endpoint.shared().host.find(reference.id())?;
            let Hosted::Module(hosted) = hosted else { return Err(not_a_module(module)) };
            let version = self.state.pin(reference.id(), &hosted);
            lock(&self.tape).uses(reference.id());
            let inputs: Vec<_> = inputs.iter().map(|t| t.shallow_clone()).collect();
            return hosted.forward(&Pass::new(Some(self)), &version.tensors, &inputs);
        }
        let arguments = inputs.iter().map(|&tensor| Value::from(tensor)).collect();
        let answer = self.call(module, "forward", arguments)?.wait()?;
        let outputs = answer.values.into_iter().map(|value| Tensor::from_values(vec![value]));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        lock(&self.tape).record(RemoteCall {
            module: reference.clone(),
            piece: answer.piece,
            inputs: inputs.iter().map(|t| t.shallow_clone()).collect(),
            outputs: outputs.iter().map(Tensor::shallow_clone).collect(),
        });
        Ok(outputs)
    }

    /// Takes everything that `losses` depend on backwards; gradients add to those of earlier calls.
    /// Each recorded call goes backwards once.
    ///
    /// # Errors
    /// A loss that is not a scalar or depends on nothing recorded; what went wrong with a piece.
    pub fn backward(&self, losses: &[&Tensor]) -> Result<(), RemoteError> {
        for loss in losses {
            if loss.numel() != 1 {
                let shape = loss.size();
                return Err(RemoteError::new(format!("a loss must be one number, this one has shape {shape:?}")));
            }
            if !loss.requires_grad() {
                return Err(RemoteError::new("the loss depends on no module that was called through the context"));
            }
        }
        let roots = losses.iter().map(|loss| (loss.shallow_clone(), loss.ones_like())).collect();
        let tape = std::mem::take(&mut *lock(&self.tape));
        let result = tape.backward(&self.endpoint, &self.state, roots, &[]);
        *lock(&self.tape) = tape;
        result.map(|_| ())
    }

    /// Gradients of a module's parameters in this context, in order; `None` where there is none.
    ///
    /// # Errors
    /// What went wrong with the call.
    pub fn gradients(&self, module: &ModuleRef) -> Result<Vec<Option<Tensor>>, RemoteError> {
        let values = self.call(module, "gradients", Vec::new())?.wait()?.values;
        values.into_iter().map(|value| FromValues::from_values(vec![value])).collect()
    }

    /// Values of a module's parameters in this context: the version that it met first.
    ///
    /// # Errors
    /// What went wrong with the call.
    pub fn parameters(&self, module: &ModuleRef) -> Result<Vec<Tensor>, RemoteError> {
        let values = self.call(module, "parameters", Vec::new())?.wait()?.values;
        values.into_iter().map(|value| FromValues::from_values(vec![value])).collect()
    }

    /// Number of the version of a module's parameters in this context.
    ///
    /// # Errors
    /// What went wrong with the call.
    pub fn version(&self, module: &ModuleRef) -> Result<i64, RemoteError> {
        FromValues::from_values(self.call(module, "version", Vec::new())?.wait()?.values)
    }

    fn call(
        &self,
        module: &ModuleRef,
        method: &str,
        arguments: Vec<Value>,
    ) -> Result<super::super::pending::Sent, RemoteError> {
        self.send(module.rref(), method, arguments)
    }

    /// Calls a method of any object as part of this context.
    pub(crate) fn send(
        &self,
        to: &super::super::RRef,
        method: &str,
        arguments: Vec<Value>,
    ) -> Result<super::super::pending::Sent, RemoteError> {
        self.state.opens_at(&self.endpoint, to.session());
        to.send(method, Some(self.state.id), arguments)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.root {
            let shared = self.endpoint.shared();
            shared.contexts.end(&self.endpoint, self.state.id, shared.session);
        }
    }
}

fn not_a_module(module: &ModuleRef) -> RemoteError {
    RemoteError::new(format!("{} is not a module", module.rref()))
}
