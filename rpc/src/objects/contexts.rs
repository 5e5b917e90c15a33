//! The autograd contexts that are open in this process, opened here or by peers, and what they have recorded.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tch::Tensor;

use super::value::RRef;
use crate::connection::Connections;
use crate::ids::{ContextId, ObjectId, Session};
use crate::proto;
use crate::proto::frame::Kind;

#[derive(Debug, Default)]
pub(crate) struct Contexts {
    open: Mutex<HashMap<ContextId, Arc<ContextState>>>,
}

impl Contexts {
    /// Returns the context, opened if it is new here, and held by `holder` from now on.
    pub fn open(&self, id: ContextId, holder: Session) -> Arc<ContextState> {
        let mut open = self.open.lock();
        let state = open.entry(id).or_insert_with(|| Arc::new(ContextState { id, recorded: Mutex::default() }));
        state.recorded.lock().holders.insert(holder);
        Arc::clone(state)
    }

    /// Removes a holder of the context, which ends with its last one.
    pub fn end(&self, connections: &Connections, id: ContextId, holder: Session) {
        self.end_where(connections, |state| state.id == id && state.leave(holder));
    }

    /// Ends what `holder` held, but for the contexts that it says it still needs.
    pub fn reconcile(&self, connections: &Connections, holder: Session, needed: &[ContextId]) {
        self.end_where(connections, |state| !needed.contains(&state.id) && state.leave(holder));
    }

    pub fn clear(&self, connections: &Connections) {
        self.end_where(connections, |_| true);
    }

    pub fn count(&self) -> usize {
        self.open.lock().len()
    }

    fn end_where(&self, connections: &Connections, over: impl Fn(&ContextState) -> bool) {
        let ended: Vec<_> = self.open.lock().extract_if(|_, state| over(state)).map(|(_, state)| state).collect();
        for state in ended {
            state.end(connections);
        }
    }
}

/// One context as this process knows it.
#[derive(Debug)]
pub(crate) struct ContextState {
    pub id: ContextId,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    holders: BTreeSet<Session>,
    modules: BTreeMap<ObjectId, Pinned>,
    pieces: HashMap<u64, Piece>,
    last_piece: u64,
    /// The processes where calls from here have opened the context.
    opened_at: BTreeSet<Session>,
}

/// The version of a module that the context began with, and the gradients so far.
#[derive(Debug)]
struct Pinned {
    version: Version,
    gradients: Vec<Option<Tensor>>,
}

/// One recorded call of a module here: its stretch of the graph, from inputs to outputs.
#[derive(Debug)]
pub(crate) struct Piece {
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<Tensor>,
    pub tape: Tape,
}

/// The values of a module's parameters after `number` steps.
#[derive(Debug)]
pub(crate) struct Version {
    pub number: u64,
    pub tensors: Vec<Tensor>,
}

impl Version {
    /// Returns the version again; its tensors share their storage.
    pub fn share(&self) -> Self {
        Self { number: self.number, tensors: self.tensors.iter().map(Tensor::shallow_clone).collect() }
    }
}

/// The remote calls that were made from one stretch of local graph, in order, and the local modules
/// whose parameters it used.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    pub calls: Vec<RemoteCall>,
    pub modules: BTreeSet<ObjectId>,
}

/// A recorded call of a module in another process, which has it as its `piece`.
#[derive(Debug)]
pub(crate) struct RemoteCall {
    pub module: RRef,
    pub piece: u64,
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<Tensor>,
}

impl ContextState {
    /// Returns the module's version in this context, which is the `current` one of the first call.
    pub fn pin(&self, id: ObjectId, current: impl FnOnce() -> Version) -> Version {
        let mut recorded = self.recorded.lock();
        let pinned = recorded.modules.entry(id).or_insert_with(|| {
            let version = current();
            let gradients = version.tensors.iter().map(|_| None).collect();
            Pinned { version, gradients }
        });
        pinned.version.share()
    }

    pub fn gradients(&self, id: ObjectId) -> Vec<Option<Tensor>> {
        let recorded = self.recorded.lock();
        let pinned = recorded.modules.get(&id).map(|pinned| pinned.gradients.iter());
        pinned.map(|gradients| gradients.map(|g| g.as_ref().map(Tensor::shallow_clone)).collect()).unwrap_or_default()
    }

    /// Adds to the gradients of a module; `None` adds nothing.
    pub fn add_gradients(&self, id: ObjectId, new: impl Iterator<Item = Option<Tensor>>) {
        let mut recorded = self.recorded.lock();
        let Some(pinned) = recorded.modules.get_mut(&id) else { return };
        for (sum, new) in pinned.gradients.iter_mut().zip(new) {
            *sum = match (sum.take(), new) {
                (Some(sum), Some(new)) => Some(sum + new),
                (sum, new) => sum.or(new),
            };
        }
    }

    /// Remembers that the context is open at another process, so that it can be ended there.
    pub fn opens_at(&self, connections: &Connections, session: Session) {
        if session != connections.session && self.recorded.lock().opened_at.insert(session) {
            connections.remote_refs.lock().add_context(session, self.id);
        }
    }

    /// Keeps a recorded call until it goes backwards, and returns its number.
    pub fn add_piece(&self, piece: Piece) -> u64 {
        let mut recorded = self.recorded.lock();
        recorded.last_piece += 1;
        let number = recorded.last_piece;
        recorded.pieces.insert(number, piece);
        number
    }

    /// Removes a recorded call.
    pub fn take_piece(&self, number: u64) -> Option<Piece> {
        self.recorded.lock().pieces.remove(&number)
    }

    /// Returns the pinned parameters of a module as the leaves of a graph.
    pub fn leaves(&self, id: ObjectId) -> Vec<Tensor> {
        self.recorded.lock().modules.get(&id).map(|pinned| pinned.version.share().tensors).unwrap_or_default()
    }

    /// Removes a holder; true if it was the last.
    fn leave(&self, holder: Session) -> bool {
        let mut recorded = self.recorded.lock();
        recorded.holders.remove(&holder) && recorded.holders.is_empty()
    }

    /// Frees what was recorded, here and where calls from here opened the context.
    fn end(&self, connections: &Connections) {
        let recorded = std::mem::take(&mut *self.recorded.lock());
        let mut remote_refs = connections.remote_refs.lock();
        for &session in &recorded.opened_at {
            if remote_refs.remove_context(session, self.id) {
                connections.send_to(session, Kind::EndContext(proto::EndContext { context: self.id }));
            }
        }
        drop(remote_refs);
        // After the lock: pieces may hold references, and dropping those takes it.
        drop(recorded);
    }
}
