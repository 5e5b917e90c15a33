//! Objects with state: a thread of their own takes their calls one after the other, so that they may
//! hold tensors (which can change threads, but not be shared) and need no locks.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use super::autograd::ContextState;
use super::link::Answer;
use super::respond::Responder;
use super::{Endpoint, FromValues, IntoValues, RemoteError, Value};

/// A type whose objects other processes can make and call.
///
/// A call has the object for itself until it returns. A method may call back into the process that
/// called it, but a call chain that comes back to an object that is still busy with it waits until
/// its deadline: put what is called back into an object of its own.
pub trait RemoteObject: Sized + Send + 'static {
    fn methods(methods: &mut Methods<Self>);
}

/// What a method knows about the call that it answers.
#[derive(Debug)]
pub struct Call {
    pub endpoint: Endpoint,
    /// Name of the process that called.
    pub caller: Arc<str>,
    pub deadline: Instant,
    pub(crate) context: Option<Arc<ContextState>>,
}

type Handler<T> = Box<dyn Fn(&mut T, &Call, Vec<Value>) -> Result<Vec<Value>, RemoteError> + Send + Sync>;

/// The methods of a type by name.
pub struct Methods<T> {
    by_name: BTreeMap<&'static str, Handler<T>>,
}

impl<T> Default for Methods<T> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new() }
    }
}

impl<T> Methods<T> {
    /// Adds a method. Arguments of another number or type are refused before it is called.
    pub fn add<A: FromValues, R: IntoValues>(
        &mut self,
        name: &'static str,
        method: impl Fn(&mut T, &Call, A) -> Result<R, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        let handler: Handler<T> =
            Box::new(
                move |object, call, arguments| Ok(method(object, call, A::from_values(arguments)?)?.into_values()),
            );
        self.by_name.insert(name, handler);
        self
    }

    fn call(&self, object: &mut T, call: &Call, name: &str, arguments: Vec<Value>) -> Result<Vec<Value>, RemoteError> {
        match self.by_name.get(name) {
            Some(method) => method(object, call, arguments),
            None => Err(unknown("method", name, self.by_name.keys().copied())),
        }
    }
}

/// One call on its way to an object.
#[derive(Debug)]
pub(crate) struct Job {
    pub call: Call,
    pub method: String,
    pub arguments: Vec<Value>,
    pub responder: Responder,
}

/// The calls that wait for an object. Its thread ends, and the object with it, when the last clone is
/// gone. Not bounded by itself: every connection bounds the calls that it has in flight.
#[derive(Clone, Debug)]
pub(crate) struct ObjectQueue(Sender<Job>);

impl ObjectQueue {
    pub fn start<T: RemoteObject>(name: &str, mut object: T, methods: Arc<Methods<T>>) -> Result<Self, RemoteError> {
        let (sender, jobs) = channel::<Job>();
        let body = move || {
            for job in jobs {
                let answer = run(&job.call, || methods.call(&mut object, &job.call, &job.method, job.arguments));
                job.responder.answer(answer.map(|values| Answer { values, piece: 0 }));
            }
        };
        std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(body)
            .map_err(|error| RemoteError::new(format!("cannot start a thread for {name}: {error}")))?;
        Ok(Self(sender))
    }

    pub fn push(&self, job: Job) {
        // Fails only after the object's thread died; the responder then answers as it is dropped.
        drop(self.0.send(job));
    }
}

/// Runs the body of a call unless its time is over; a panic becomes an error.
pub(crate) fn run<T>(call: &Call, body: impl FnOnce() -> Result<T, RemoteError>) -> Result<T, RemoteError> {
    if Instant::now() >= call.deadline {
        return Err(RemoteError::new("its time was over before its turn came"));
    }
    // A body that panicked inside `no_grad` left the mode to its thread; each begins anew.
    catch_unwind(AssertUnwindSafe(|| tch::with_grad(body)))
        .unwrap_or_else(|payload| Err(RemoteError::from_panic(&*payload)))
}

/// Refuses a name that is not registered and tells those that are.
pub(crate) fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> RemoteError {
    let known = known.collect::<Vec<_>>().join(", ");
    RemoteError::new(format!("no {what} is called `{name}`; there are: {known}"))
}
