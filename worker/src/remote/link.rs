//! One connection to a peer: frames out, replies matched to the calls that wait for them. What the
//! peer asks of this process is `inbox`'s business.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::wire::proto;
use super::{RemoteError, Value};

/// Calls that may wait for a reply on one connection; a further one waits for its turn. This bounds
/// the frames that either end has to hold: each is a call, a call's reply, or belongs to a reference.
const MAX_IN_FLIGHT: usize = 1024;

/// What a call gave: its values, and its place on the tape if a context recorded it.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub values: Vec<Value>,
    pub piece: u64,
}

/// Where an answer is put and awaited.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    answer: Mutex<Option<Result<Answer, RemoteError>>>,
    filled: Condvar,
}

impl Slot {
    pub fn fill(&self, answer: Result<Answer, RemoteError>) {
        *lock(&self.answer) = Some(answer);
        self.filled.notify_all();
    }

    /// Waits until `deadline`; `None` when it passes.
    pub fn wait(&self, deadline: Instant) -> Option<Result<Answer, RemoteError>> {
        let mut answer = lock(&self.answer);
        while answer.is_none() {
            let left = deadline.checked_duration_since(Instant::now())?;
            answer = self.filled.wait_timeout(answer, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        answer.take()
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    pub peer: Arc<str>,
    pub session: u64,
    next_id: AtomicU64,
    pending: Mutex<Pending>,
    room: Condvar,
}

#[derive(Debug)]
struct Pending {
    /// `None` once the connection is closed.
    out: Option<UnboundedSender<proto::Frame>>,
    calls: HashMap<u64, Waiting>,
    closed_because: String,
}

#[derive(Debug)]
struct Waiting {
    slot: Arc<Slot>,
    call: String,
}

impl Link {
    /// A connection to `peer`, and the frames that are to be written to it. They end when it closes.
    pub fn new(peer: Arc<str>, session: u64, out: UnboundedSender<proto::Frame>) -> Self {
        Self {
            peer,
            session,
            next_id: AtomicU64::new(1),
            pending: Mutex::new(Pending { out: Some(out), calls: HashMap::new(), closed_because: String::new() }),
            room: Condvar::new(),
        }
    }

    pub fn channel() -> (UnboundedSender<proto::Frame>, UnboundedReceiver<proto::Frame>) {
        unbounded_channel()
    }

    /// Sends a frame that awaits no reply; false if the connection is closed.
    pub fn send(&self, kind: proto::frame::Kind) -> bool {
        lock(&self.pending).out.as_ref().is_some_and(|out| out.send(proto::Frame { kind: Some(kind) }).is_ok())
    }

    /// Sends a call, waiting until `deadline` for its turn. `describe` names it in errors.
    pub fn call(
        &self,
        mut message: proto::Call,
        describe: &str,
        timeout: Duration,
        deadline: Instant,
    ) -> Result<(u64, Arc<Slot>), RemoteError> {
        let mut pending = lock(&self.pending);
        while pending.out.is_some() && pending.calls.len() >= MAX_IN_FLIGHT {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(self.late(describe, timeout));
            };
            pending = self.room.wait_timeout(pending, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        message.id = id;
        let frame = proto::Frame { kind: Some(proto::frame::Kind::Call(message)) };
        if pending.out.as_ref().is_none_or(|out| out.send(frame).is_err()) {
            return Err(self.lost(describe, &pending.closed_because));
        }
        let slot = Arc::<Slot>::default();
        pending.calls.insert(id, Waiting { slot: Arc::clone(&slot), call: describe.to_owned() });
        Ok((id, slot))
    }

    /// Hands a reply to the call that waits for it; a reply that nobody awaits any more is dropped.
    pub fn answer(&self, id: u64, answer: Result<Answer, RemoteError>) {
        let waiting = lock(&self.pending).calls.remove(&id);
        self.room.notify_one();
        if let Some(waiting) = waiting {
            waiting.slot.fill(answer.map_err(|error| RemoteError::Failed {
                peer: self.peer.to_string(),
                call: waiting.call,
                message: error.to_string(),
            }));
        }
    }

    /// Nobody waits for this call any more.
    pub fn forget(&self, id: u64) {
        lock(&self.pending).calls.remove(&id);
        self.room.notify_one();
    }

    /// Ends the connection; what waits for a reply gets an error.
    pub fn close(&self, reason: &str) {
        let calls = {
            let mut pending = lock(&self.pending);
            if pending.out.take().is_none() {
                return;
            }
            reason.clone_into(&mut pending.closed_because);
            std::mem::take(&mut pending.calls)
        };
        self.room.notify_all();
        for waiting in calls.into_values() {
            waiting.slot.fill(Err(self.lost(&waiting.call, reason)));
        }
    }

    pub fn in_flight(&self) -> usize {
        lock(&self.pending).calls.len()
    }

    fn lost(&self, call: &str, reason: &str) -> RemoteError {
        RemoteError::Lost { peer: self.peer.to_string(), call: call.to_owned(), reason: reason.to_owned() }
    }

    fn late(&self, call: &str, timeout: Duration) -> RemoteError {
        RemoteError::Deadline { peer: self.peer.to_string(), call: call.to_owned(), timeout }
    }
}

/// Locks, also after a panic elsewhere: every critical section here leaves whole data behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
