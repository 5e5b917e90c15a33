//! The handle of an autograd context.

use std::sync::Arc;

use parking_lot::Mutex;
use tch::Tensor;

use super::module_ref::ModuleRef;
use crate::connection::Sent;
use crate::error::RemoteError;
use crate::objects::{Answer, ContextState, Endpoint, FromValues, RRef, Tape, Value};

/// Records calls of modules, takes them backwards, and keeps their gradients apart from those of
/// other contexts. Dropping it frees it in all processes that it touched; so does the end of this
/// process's lease.
#[derive(Debug)]
pub struct Context {
    pub(super) endpoint: Endpoint,
    pub(super) state: Arc<ContextState>,
    /// The calls from this process's own stretch of the graph.
    pub(super) tape: Mutex<Tape>,
    /// True for the context that a trainer opened, false for its continuation in another process.
    root: bool,
}

impl Context {
    #[must_use]
    pub fn new(endpoint: &Endpoint) -> Self {
        // 0 means "no context" on the wire.
        let id = rand::random_range(1..u64::MAX);
        let state = endpoint.shared().contexts.open(id, endpoint.connections().session);
        Self { endpoint: endpoint.clone(), state, tape: Mutex::default(), root: true }
    }

    pub(crate) fn part_of(endpoint: Endpoint, state: Arc<ContextState>) -> Self {
        Self { endpoint, state, tape: Mutex::default(), root: false }
    }

    pub(crate) fn into_tape(self) -> Tape {
        std::mem::take(&mut *self.tape.lock())
    }

    /// Returns the gradients of a module's parameters in this context, in order; `None` where there is none.
    ///
    /// # Errors
    /// If the call failed.
    pub fn gradients(&self, module: &ModuleRef) -> Result<Vec<Option<Tensor>>, RemoteError> {
        let values = self.call(module, "gradients", Vec::new())?.wait()?.values;
        values.into_iter().map(|value| FromValues::from_values(vec![value])).collect()
    }

    /// Returns the values of a module's parameters in this context: the version that it met first.
    ///
    /// # Errors
    /// If the call failed.
    pub fn parameters(&self, module: &ModuleRef) -> Result<Vec<Tensor>, RemoteError> {
        let values = self.call(module, "parameters", Vec::new())?.wait()?.values;
        values.into_iter().map(|value| FromValues::from_values(vec![value])).collect()
    }

    /// Returns the number of the version of a module's parameters in this context.
    ///
    /// # Errors
    /// If the call failed.
    pub fn version(&self, module: &ModuleRef) -> Result<i64, RemoteError> {
        FromValues::from_values(self.call(module, "version", Vec::new())?.wait()?.values)
    }

    pub(super) fn call(
        &self,
        module: &ModuleRef,
        method: &str,
        arguments: Vec<Value>,
    ) -> Result<Sent<Answer>, RemoteError> {
        self.send(module.rref(), method, arguments)
    }

    /// Calls a method of any object as part of this context.
    pub(crate) fn send(&self, to: &RRef, method: &str, arguments: Vec<Value>) -> Result<Sent<Answer>, RemoteError> {
        self.state.opens_at(self.endpoint.connections(), to.session());
        to.send(method, Some(self.state.id), arguments)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.root {
            let connections = self.endpoint.connections();
            self.endpoint.shared().contexts.end(connections, self.state.id, connections.session);
        }
    }
}
