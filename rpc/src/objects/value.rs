//! The values that travel in calls, and references to objects, which are values too.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tch::Tensor;

use super::target::Target;
use crate::connection::Sent;
use crate::error::RemoteError;
use crate::ids::{ContextId, ObjectId, Session};

/// One argument or result of a call.
#[derive(Debug)]
pub enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Data(Bytes),
    Tensor(Tensor),
    Ref(RRef),
    List(Vec<Value>),
}

impl Value {
    /// Returns the value again: tensors share their storage, references are counted once more.
    #[must_use]
    pub fn share(&self) -> Self {
        match self {
            Self::Null => Self::Null,
            Self::Bool(v) => Self::Bool(*v),
            Self::Int(v) => Self::Int(*v),
            Self::Float(v) => Self::Float(*v),
            Self::Text(v) => Self::Text(v.clone()),
            Self::Data(v) => Self::Data(v.clone()),
            Self::Tensor(v) => Self::Tensor(v.shallow_clone()),
            Self::Ref(v) => Self::Ref(v.clone()),
            Self::List(v) => Self::List(v.iter().map(Self::share).collect()),
        }
    }

    /// Describes the value in errors.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".into(),
            Self::Bool(_) => "a boolean".into(),
            Self::Int(_) => "an integer".into(),
            Self::Float(_) => "a float".into(),
            Self::Text(_) => "a text".into(),
            Self::Data(_) => "bytes".into(),
            Self::Tensor(t) => format!("a {:?} tensor of shape {:?}", t.kind(), t.size()),
            Self::Ref(r) => format!("a reference to {r}"),
            Self::List(v) => format!("a list of {}", v.len()),
        }
    }
}

/// The result of a call: its values, and the number under which a context recorded it, else 0.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub values: Vec<Value>,
    pub piece: u64,
}

/// The process and the session that a call goes to.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    pub peer: Arc<str>,
    /// The session that must answer; any for calls that name no object.
    pub session: Option<Session>,
    /// Name of the object, for messages.
    pub what: Arc<str>,
    pub timeout: Duration,
    /// True if a call waits, until its deadline, for a process that takes the place of one that has ended.
    pub awaits_replacement: bool,
}

/// Makes calls for a process, and releases its references.
pub(crate) trait Caller: Send + Sync {
    fn session(&self) -> Session;

    /// Starts a call, here or on another process.
    fn send_call(
        self: Arc<Self>,
        to: &Destination,
        target: Target,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent<Answer>, RemoteError>;

    /// Counts one reference less, after its last clone was dropped.
    fn release(&self, owner: Session, object: ObjectId);
}

/// A counted reference to an object somewhere in the job. The object lives at least until the last
/// clone everywhere is dropped, or the processes that hold one are gone.
#[derive(Clone)]
pub struct RRef {
    inner: Arc<Inner>,
    timeout: Duration,
}

struct Inner {
    caller: Arc<dyn Caller>,
    owner: Arc<str>,
    session: Session,
    id: ObjectId,
    name: Arc<str>,
}

impl RRef {
    pub(crate) fn new(
        caller: Arc<dyn Caller>,
        timeout: Duration,
        (owner, session): (Arc<str>, Session),
        (id, name): (ObjectId, Arc<str>),
    ) -> Self {
        Self { inner: Arc::new(Inner { caller, owner, session, id, name }), timeout }
    }

    /// Returns the name of the process that has the object.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.inner.owner
    }

    #[must_use]
    pub fn is_local(&self) -> bool {
        self.inner.session == self.inner.caller.session()
    }

    /// Returns a reference to the same object with another time limit for each call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Calls a method as part of `context`, if one records it.
    pub(crate) fn send(
        &self,
        method: &str,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent<Answer>, RemoteError> {
        self.send_to(Target::Method { object: self.id(), name: method.to_owned() }, context, arguments)
    }

    /// Starts a call of any kind on the process that has the object.
    pub(crate) fn send_to(
        &self,
        target: Target,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent<Answer>, RemoteError> {
        let to = Destination {
            peer: Arc::clone(&self.inner.owner),
            session: Some(self.inner.session),
            what: Arc::clone(&self.inner.name),
            timeout: self.timeout,
            awaits_replacement: false,
        };
        Arc::clone(&self.inner.caller).send_call(&to, target, context, arguments)
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
        self.caller.release(self.session, self.id);
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
