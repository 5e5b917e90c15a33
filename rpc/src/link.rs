//! One connection to a peer: frames out, replies matched to the calls that wait for them. What the
//! peer asks of this process is `inbox`'s business.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::lock::lock;
use super::runtime_driver::Inner;
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

/// Where an answer is put and awaited, by one thread.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: Mutex<State>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    answer: Option<Result<Answer, RemoteError>>,
    awaited: Option<Awaited>,
}

/// How it is awaited; each is woken in its own way.
#[derive(Debug)]
enum Awaited {
    Asleep,
    Polled(Waker),
}

impl Slot {
    pub fn fill(&self, answer: Result<Answer, RemoteError>) {
        let awaited = {
            let mut state = lock(&self.state);
            state.answer = Some(answer);
            state.awaited.take()
        };
        match awaited {
            Some(Awaited::Asleep) => self.filled.notify_all(),
            Some(Awaited::Polled(waker)) => waker.wake(),
            None => {}
        }
    }

    /// Waits until `deadline`; `None` when it passes.
    pub fn wait(&self, deadline: Instant) -> Option<Result<Answer, RemoteError>> {
        let mut state = lock(&self.state);
        while state.answer.is_none() {
            let left = deadline.checked_duration_since(Instant::now())?;
            state.awaited = Some(Awaited::Asleep);
            state = self.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.answer.take()
    }

    /// As [`Slot::wait`], moving the connections' bytes meanwhile.
    pub fn wait_driving(&self, driver: &Inner, deadline: Instant) -> Option<Result<Answer, RemoteError>> {
        if let Some(answer) = lock(&self.state).answer.take() {
            return Some(answer);
        }
        driver.wait(async { tokio::time::timeout_at(deadline.into(), poll_fn(|cx| self.poll(cx))).await.ok() })
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Answer, RemoteError>> {
        let mut state = lock(&self.state);
        match state.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                state.awaited = Some(Awaited::Polled(cx.waker().clone()));
                Poll::Pending
            }
        }
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
    /// Calls that wait for their turn.
    queued: usize,
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
            pending: Mutex::new(Pending {
                out: Some(out),
                calls: HashMap::new(),
                queued: 0,
                closed_because: String::new(),
            }),
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
            pending.queued += 1;
            pending = self.room.wait_timeout(pending, left).unwrap_or_else(PoisonError::into_inner).0;
            pending.queued -= 1;
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
        if let Some(waiting) = self.take(id) {
            waiting.slot.fill(answer.map_err(|error| RemoteError::Failed {
                peer: self.peer.to_string(),
                call: waiting.call,
                message: error.to_string(),
            }));
        }
    }

    /// Nobody waits for this call any more.
    pub fn forget(&self, id: u64) {
        self.take(id);
    }

    /// Takes a call out of those that wait for a reply. The turn of a queued one comes, if there is one: to
    /// notify nobody costs a system call too.
    fn take(&self, id: u64) -> Option<Waiting> {
        let (waiting, queued) = {
            let mut pending = lock(&self.pending);
            (pending.calls.remove(&id), pending.queued > 0)
        };
        if queued {
            self.room.notify_one();
        }
        waiting
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
