//! References to objects of other processes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::endpoint::Destination;
use super::object_table::{ObjectId, Session};
use super::pending::Sent;
use super::remote_refs::ContextId;
use super::target::Target;
use super::{Endpoint, FromValues, IntoValues, Pending, RemoteError, Value};

/// A counted reference to an object somewhere in the job. The object lives at least until the last
/// clone everywhere is dropped, or the processes that hold one are gone.
#[derive(Clone)]
pub struct RRef {
    inner: Arc<Inner>,
    timeout: Duration,
}

struct Inner {
    endpoint: Endpoint,
    owner: Arc<str>,
    session: Session,
    id: ObjectId,
    name: Arc<str>,
}

impl RRef {
    pub(crate) fn new(endpoint: Endpoint, owner: Arc<str>, session: Session, id: ObjectId, name: Arc<str>) -> Self {
        let timeout = endpoint.shared().settings.timeout;
        Self { inner: Arc::new(Inner { endpoint, owner, session, id, name }), timeout }
    }

    /// Name of the process that has the object.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.inner.owner
    }

    #[must_use]
    pub fn is_local(&self) -> bool {
        self.inner.session == self.inner.endpoint.shared().session
    }

    /// The same object, with another time limit for each call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Calls a method and waits for its result.
    ///
    /// # Errors
    /// What went wrong with the call, also inside the method.
    pub fn rpc_sync<R: FromValues>(&self, method: &str, arguments: impl IntoValues) -> Result<R, RemoteError> {
        self.rpc_async(method, arguments)?.wait()
    }

    /// Calls a method. Calls from one thread to one object run in the order they were made.
    ///
    /// # Errors
    /// If the call cannot be sent.
    pub fn rpc_async<R: FromValues>(
        &self,
        method: &str,
        arguments: impl IntoValues,
    ) -> Result<Pending<R>, RemoteError> {
        Ok(Pending::new(self.send(method, None, arguments.into_values())?))
    }

    /// A copy of the value, if the reference is to a function's result.
    ///
    /// # Errors
    /// What went wrong with the call, or that this is an object: call its methods instead.
    pub fn to_here<R: FromValues>(&self) -> Result<R, RemoteError> {
        self.rpc_sync("to_here", ())
    }

    pub(crate) fn send(
        &self,
        method: &str,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent, RemoteError> {
        let target = Target::Method { object: self.id(), name: method.to_owned() };
        self.endpoint().send_call(&self.destination(), target, context, arguments)
    }

    pub(crate) fn destination(&self) -> Destination {
        Destination {
            peer: Arc::clone(&self.inner.owner),
            session: Some(self.inner.session),
            what: Arc::clone(&self.inner.name),
            timeout: self.timeout,
        }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }

    pub(crate) fn session(&self) -> Session {
        self.inner.session
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.inner.id
    }

    pub(crate) fn object_name(&self) -> &str {
        &self.inner.name
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.endpoint.let_go(self.session, self.id);
    }
}

/// Two references are equal if they refer to the same object.
impl PartialEq for RRef {
    fn eq(&self, other: &Self) -> bool {
        (self.inner.session, self.inner.id) == (other.inner.session, other.inner.id)
    }
}

impl Eq for RRef {}

impl fmt::Display for RRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` on {}", self.inner.name, self.inner.owner)
    }
}

impl fmt::Debug for RRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RRef({} {self})", self.inner.id)
    }
}
