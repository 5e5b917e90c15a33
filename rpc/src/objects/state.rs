//! The state of one process's end of all remote calls, and the types that refer to it: calls, hosted objects and the
//! registry that makes them.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::contexts::{ContextState, Contexts};
use super::object_table::ObjectTable;
use super::reply::Responder;
use super::value::{Caller, RRef, Value};
use crate::connection::{Connections, Process};
use crate::error::RemoteError;
use crate::ids::{ObjectId, Session};

/// A handle to this process's end; clones are the same end. Its methods block and are for ordinary
/// threads: hosted methods, training loops.
#[derive(Clone)]
pub struct Endpoint(Arc<Shared>);

pub(crate) struct Shared {
    pub connections: Connections,
    pub registry: Registry,
    pub objects: ObjectTable<Arc<dyn Hosted>>,
    pub contexts: Contexts,
    /// The server that knows where this process listens, and the address; see [`rendezvous`](crate::rendezvous).
    pub published: Mutex<Option<(Arc<str>, String)>>,
}

/// An object, a module or a value behind references.
pub(crate) trait Hosted: Any + Send + Sync {
    /// Runs a call, or hands it to a thread that will; does not wait.
    fn call(self: Arc<Self>, job: Job);
}

/// A call on its way to a hosted object.
pub(crate) struct Job {
    pub call: Call,
    pub object: ObjectId,
    /// Name of the object, for messages.
    pub name: Arc<str>,
    pub method: String,
    pub arguments: Vec<Value>,
    pub responder: Responder,
}

/// The circumstances of the call that a method answers.
#[derive(Debug)]
pub struct Call {
    pub endpoint: Endpoint,
    /// Name of the process that called.
    pub caller: Arc<str>,
    pub deadline: Instant,
    pub(crate) context: Option<Arc<ContextState>>,
}

pub(crate) type Function = Box<dyn Fn(&Call, Vec<Value>) -> Result<Vec<Value>, RemoteError> + Send + Sync>;
pub(crate) type Constructor = Box<dyn Fn(&Call, Vec<Value>) -> Result<Arc<dyn Hosted>, RemoteError> + Send + Sync>;

/// The functions and constructors that a process offers to others, by name. It is filled when the process starts and
/// does not change.
#[derive(Default)]
pub struct Registry {
    pub(super) functions: BTreeMap<String, Function>,
    pub(super) constructors: BTreeMap<String, Constructor>,
}

impl Endpoint {
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.0.connections
    }

    /// Returns this process's name in the job.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.connections().name
    }

    /// Hosts a new object, and returns the first reference to it.
    pub(crate) fn adopt(&self, name: Arc<str>, hosted: Arc<dyn Hosted>) -> RRef {
        let session = self.connections().session;
        let id = self.0.objects.insert(Arc::clone(&name), hosted, session);
        self.reference((Arc::clone(&self.connections().name), session), (id, name))
    }

    /// Returns a reference to an object that is counted already.
    pub(crate) fn reference(&self, owner: (Arc<str>, Session), object: (ObjectId, Arc<str>)) -> RRef {
        let caller: Arc<dyn Caller> = self.0.clone();
        RRef::new(caller, self.connections().settings.timeout, owner, object)
    }

    /// Returns this end as its connections see it.
    pub(crate) fn process(&self) -> Arc<dyn Process> {
        self.0.clone()
    }
}
