//! One connection to a peer: sends frames, and matches replies to the calls that wait for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::error::RemoteError;
use crate::ids::Session;
use crate::proto;
use crate::wait_clock::waits;

/// The most calls that may wait for a reply on one connection; a further one is queued. This bounds the frames
/// that either end has to hold: each is a call, a call's reply, or belongs to a reference.
const MAX_IN_FLIGHT: usize = 1024;

/// Takes the reply to a call, or the reason why there is none.
pub(crate) type OnReply = Box<dyn FnOnce(Result<proto::Reply, RemoteError>) + Send>;

pub(crate) struct Link {
    pub peer: Arc<str>,
    pub session: Session,
    pub incarnation: u32,
    next_id: AtomicU64,
    pending: Mutex<Pending>,
    room: Condvar,
    /// Notices of this connection change what the peer holds here.
    counts: Mutex<bool>,
}

struct Pending {
    /// `None` once the connection is closed.
    out: Option<UnboundedSender<proto::Frame>>,
    calls: HashMap<u64, Waiting>,
    /// Number of calls that wait until they may be sent.
    queued: usize,
    closed_because: String,
}

struct Waiting {
    on_reply: OnReply,
    call: Arc<str>,
}

impl Link {
    /// Returns a connection to `peer` that sends through `out`, until it is closed.
    pub fn new(peer: Arc<str>, (session, incarnation): (Session, u32), out: UnboundedSender<proto::Frame>) -> Self {
        Self {
            peer,
            session,
            incarnation,
            next_id: AtomicU64::new(1),
            pending: Mutex::new(Pending {
                out: Some(out),
                calls: HashMap::new(),
                queued: 0,
                closed_because: String::new(),
            }),
            room: Condvar::new(),
            counts: Mutex::new(true),
        }
    }

    pub fn channel() -> (UnboundedSender<proto::Frame>, UnboundedReceiver<proto::Frame>) {
        unbounded_channel()
    }

    /// Sends a frame that awaits no reply; false if the connection is closed.
    pub fn send(&self, kind: proto::frame::Kind) -> bool {
        self.pending.lock().out.as_ref().is_some_and(|out| out.send(proto::Frame { kind: Some(kind) }).is_ok())
    }

    /// Sends a call, waiting until `deadline` while too many others are in flight; returns its number. `describe` names
    /// it in errors.
    pub fn call(
        &self,
        mut message: proto::Call,
        describe: &Arc<str>,
        timeout: Duration,
        deadline: Instant,
        on_reply: OnReply,
    ) -> Result<u64, RemoteError> {
        let mut pending = self.pending.lock();
        while pending.out.is_some() && pending.calls.len() >= MAX_IN_FLIGHT {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(self.late(describe, timeout));
            };
            let _waits = waits();
            pending.queued += 1;
            self.room.wait_for(&mut pending, left);
            pending.queued -= 1;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        message.id = id;
        let frame = proto::Frame { kind: Some(proto::frame::Kind::Call(message)) };
        if pending.out.as_ref().is_none_or(|out| out.send(frame).is_err()) {
            return Err(self.lost(describe, &pending.closed_because));
        }
        pending.calls.insert(id, Waiting { on_reply, call: Arc::clone(describe) });
        Ok(id)
    }

    /// Hands a reply to the call that waits for it; gives it back if no call does any more.
    pub fn answer(&self, mut reply: proto::Reply) -> Result<(), proto::Reply> {
        let Some(Waiting { on_reply, call }) = self.take(reply.id) else { return Err(reply) };
        on_reply(match reply.error.take() {
            Some(proto::Error { message }) => {
                Err(RemoteError::Failed { peer: self.peer.to_string(), call: call.to_string(), message })
            }
            None => Ok(reply),
        });
        Ok(())
    }

    /// Removes a call whose reply is not awaited any more.
    pub fn forget(&self, id: u64) {
        self.take(id);
    }

    /// Removes a call from those that wait for a reply, and wakes a queued one if there is any: a notification
    /// without a receiver costs a system call too.
    fn take(&self, id: u64) -> Option<Waiting> {
        let (waiting, queued) = {
            let mut pending = self.pending.lock();
            (pending.calls.remove(&id), pending.queued > 0)
        };
        if queued {
            self.room.notify_one();
        }
        waiting
    }

    /// Runs `change`, a notice of this connection about what the peer holds here, unless the connection is outdated.
    pub fn count(&self, change: impl FnOnce()) {
        let counts = self.counts.lock();
        if *counts {
            change();
        }
    }

    /// Lets later notices of this connection change nothing: the peer has said on another one what it holds, or it is gone and
    /// holds nothing. Those that are being read yet would count twice.
    pub fn outdate(&self) {
        *self.counts.lock() = false;
    }

    /// Ends the connection; calls that wait for a reply get an error.
    pub fn close(&self, reason: &str) {
        let calls = {
            let mut pending = self.pending.lock();
            if pending.out.take().is_none() {
                return;
            }
            reason.clone_into(&mut pending.closed_because);
            std::mem::take(&mut pending.calls)
        };
        self.room.notify_all();
        for waiting in calls.into_values() {
            let lost = self.lost(&waiting.call, reason);
            (waiting.on_reply)(Err(lost));
        }
    }

    pub fn in_flight(&self) -> usize {
        self.pending.lock().calls.len()
    }

    fn lost(&self, call: &str, reason: &str) -> RemoteError {
        RemoteError::Lost { peer: self.peer.to_string(), call: call.to_owned(), reason: reason.to_owned() }
    }

    fn late(&self, call: &str, timeout: Duration) -> RemoteError {
        RemoteError::Deadline { peer: self.peer.to_string(), call: call.to_owned(), timeout }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("peer", &self.peer).field("session", &self.session).finish_non_exhaustive()
    }
}
