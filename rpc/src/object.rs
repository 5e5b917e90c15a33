//! Objects with state: their calls run one after the other, so that they may hold tensors (which can
//! change threads, but not be shared) and need no locks. A thread of the object's own takes the calls; one
//! to a quick method runs where it arrives if nothing is before it, which saves two changes of threads.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Instant;

use super::autograd::ContextState;
use super::error::unknown;
use super::link::Answer;
use super::lock::lock;
use super::reply::Responder;
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
    by_name: BTreeMap<&'static str, Method<T>>,
}

struct Method<T> {
    handler: Handler<T>,
    quick: bool,
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
        self.insert(name, false, method)
    }

    /// Adds a method that takes microseconds. It may run on the thread that reads the connection, so it
    /// must not wait; a call to another process from within it is refused.
    pub fn add_quick<A: FromValues, R: IntoValues>(
        &mut self,
        name: &'static str,
        method: impl Fn(&mut T, &Call, A) -> Result<R, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        self.insert(name, true, method)
    }

    fn insert<A: FromValues, R: IntoValues>(
        &mut self,
        name: &'static str,
        quick: bool,
        method: impl Fn(&mut T, &Call, A) -> Result<R, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        let handler: Handler<T> =
            Box::new(
                move |object, call, arguments| Ok(method(object, call, A::from_values(arguments)?)?.into_values()),
            );
        self.by_name.insert(name, Method { handler, quick });
        self
    }

    fn is_quick(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|method| method.quick)
    }

    fn call(&self, object: &mut T, call: &Call, name: &str, arguments: Vec<Value>) -> Result<Vec<Value>, RemoteError> {
        match self.by_name.get(name) {
            Some(method) => (method.handler)(object, call, arguments),
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

/// An object and the calls that wait for it. Its thread ends, and the object with it, when the last clone
/// is gone. Not bounded by itself: every connection bounds the calls that it has in flight.
#[derive(Clone)]
pub(crate) struct ObjectQueue {
    object: Arc<dyn Here>,
    jobs: Sender<Job>,
}

/// An object that calls can run on where they arrive.
trait Here: Send + Sync {
    /// Runs the call if its method is quick and nothing else is before it; else gives it back, to be queued.
    fn run_now(&self, job: Job) -> Option<Job>;
}

struct Occupied<T> {
    object: Mutex<T>,
    /// Calls in the queue, with the one that runs.
    waiting: AtomicUsize,
    methods: Arc<Methods<T>>,
}

impl<T: RemoteObject> Occupied<T> {
    fn run(&self, object: &mut T, job: &mut Job) -> Result<Answer, RemoteError> {
        let arguments = std::mem::take(&mut job.arguments);
        let values = run(&job.call, || self.methods.call(object, &job.call, &job.method, arguments));
        values.map(|values| Answer { values, piece: 0 })
    }
}

impl<T: RemoteObject> Here for Occupied<T> {
    fn run_now(&self, mut job: Job) -> Option<Job> {
        let free = self.methods.is_quick(&job.method) && self.waiting.load(Ordering::Acquire) == 0;
        let guard = if free { self.object.try_lock() } else { Err(TryLockError::WouldBlock) };
        let Ok(mut object) = guard else {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            return Some(job);
        };
        let answer = QUICK.with(|quick| {
            quick.set(true);
            let answer = self.run(&mut object, &mut job);
            quick.set(false);
            answer
        });
        drop(object);
        job.responder.answer(answer);
        None
    }
}

thread_local! {
    /// This thread runs a quick method.
    static QUICK: Cell<bool> = const { Cell::new(false) };
}

/// True on a thread that must not wait.
pub(crate) fn must_not_wait() -> bool {
    QUICK.get()
}

impl ObjectQueue {
    pub fn start<T: RemoteObject>(name: &str, object: T, methods: Arc<Methods<T>>) -> Result<Self, RemoteError> {
        let (sender, jobs) = channel::<Job>();
        let object = Arc::new(Occupied { object: Mutex::new(object), waiting: AtomicUsize::new(0), methods });
        let occupied = Arc::clone(&object);
        let body = move || {
            for mut job in jobs {
                let answer = occupied.run(&mut lock(&occupied.object), &mut job);
                // First: the caller's next call may come at once.
                occupied.waiting.fetch_sub(1, Ordering::AcqRel);
                job.responder.answer(answer);
            }
        };
        std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(body)
            .map_err(|error| RemoteError::new(format!("cannot start a thread for {name}: {error}")))?;
        Ok(Self { object, jobs: sender })
    }

    pub fn push(&self, job: Job) {
        if let Some(job) = self.object.run_now(job) {
            // Fails only after the object's thread died; the responder then answers as it is dropped.
            drop(self.jobs.send(job));
        }
    }
}

impl fmt::Debug for ObjectQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectQueue").finish_non_exhaustive()
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
