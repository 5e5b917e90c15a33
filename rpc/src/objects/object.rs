//! Objects with state: their calls run one after the other, so that they may hold tensors (which can
//! change threads, but not be shared) and need no locks. A thread of the object's own takes the calls; one
//! to a quick method runs where it arrives if nothing is before it, which saves two changes of threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;

use super::convert::{FromValues, IntoValues};
use super::execution::run;
use super::state::{Call, Hosted, Job};
use super::value::{Answer, Value};
use crate::error::{RemoteError, unknown};
use crate::quick;

/// A type whose objects other processes can make and call.
///
/// A call has the object for itself until it returns. A method may call back into the process that
/// called it, but a call chain that comes back to an object that is still busy with it waits until
/// its deadline: put what is called back into an object of its own.
pub trait RemoteObject: Sized + Send + 'static {
    fn methods(methods: &mut Methods<Self>);
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

/// An object and the calls that wait for it. Dropping it ends the object's thread, and the object with it. Not
/// bounded by itself: every connection bounds the calls that it has in flight.
pub(crate) struct ObjectQueue {
    object: Arc<dyn CallInPlace>,
    jobs: Sender<Job>,
}

/// An object that calls can run on where they arrive.
trait CallInPlace: Send + Sync {
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

impl<T: RemoteObject> CallInPlace for Occupied<T> {
    fn run_now(&self, mut job: Job) -> Option<Job> {
        let free = self.methods.is_quick(&job.method) && self.waiting.load(Ordering::Acquire) == 0;
        let Some(mut object) = free.then(|| self.object.try_lock()).flatten() else {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            return Some(job);
        };
        let answer = quick::mark(|| self.run(&mut object, &mut job));
        drop(object);
        job.responder.answer(answer);
        None
    }
}

impl ObjectQueue {
    pub fn start<T: RemoteObject>(name: &str, object: T, methods: Arc<Methods<T>>) -> Result<Self, RemoteError> {
        let (sender, jobs) = channel::<Job>();
        let object = Arc::new(Occupied { object: Mutex::new(object), waiting: AtomicUsize::new(0), methods });
        let occupied = Arc::clone(&object);
        let body = move || {
            for mut job in jobs {
                let answer = occupied.run(&mut occupied.object.lock(), &mut job);
                // Before the answer: the caller's next call may come at once.
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
}

impl Hosted for ObjectQueue {
    fn call(self: Arc<Self>, job: Job) {
        if let Some(job) = self.object.run_now(job) {
            // Fails only after the object's thread died; the responder then answers as it is dropped.
            drop(self.jobs.send(job));
        }
    }
}
