//! The contexts that are open in this process: their own, and what others recorded here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use tch::Tensor;

use super::super::lock::lock;
use super::super::object_table::{ObjectId, Session};
use super::super::remote_refs::ContextId;
use super::super::wire::proto;
use super::super::{Endpoint, FromValues, RemoteError, Value};
use super::module::{HostedModule, Version, leaf, share};
use super::tape::Tape;
use super::{Context, Pass};

#[derive(Debug, Default)]
pub(crate) struct Contexts {
    open: Mutex<HashMap<ContextId, Arc<ContextState>>>,
}

impl Contexts {
    /// The context, opened if it is new here, and held by `holder` from now on.
    pub fn open(&self, id: ContextId, holder: Session) -> Arc<ContextState> {
        let mut open = lock(&self.open);
        let state = open.entry(id).or_insert_with(|| Arc::new(ContextState { id, recorded: Mutex::default() }));
        lock(&state.recorded).holders.insert(holder);
        Arc::clone(state)
    }

    /// `holder` does not need the context any more; with its last holder it ends.
    pub fn end(&self, endpoint: &Endpoint, id: ContextId, holder: Session) {
        self.end_where(endpoint, |state| state.id == id && state.leave(holder));
    }

    /// Ends what `holder` held, but for the contexts that it says it still needs.
    pub fn reconcile(&self, endpoint: &Endpoint, holder: Session, needed: &[ContextId]) {
        self.end_where(endpoint, |state| !needed.contains(&state.id) && state.leave(holder));
    }

    pub fn clear(&self, endpoint: &Endpoint) {
        self.end_where(endpoint, |_| true);
    }

    pub fn count(&self) -> usize {
        lock(&self.open).len()
    }

    fn end_where(&self, endpoint: &Endpoint, over: impl Fn(&ContextState) -> bool) {
        let ended: Vec<_> = lock(&self.open).extract_if(|_, state| over(state)).map(|(_, state)| state).collect();
        for state in ended {
            state.end(endpoint);
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
    /// Processes where the context is open because of calls from here.
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
struct Piece {
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    tape: Tape,
}

impl ContextState {
    /// The module's version in this context.
    pub fn pin(&self, id: ObjectId, module: &HostedModule) -> Version {
        let mut recorded = lock(&self.recorded);
        let pinned = recorded.modules.entry(id).or_insert_with(|| {
            let version = module.current();
            let gradients = version.tensors.iter().map(|_| None).collect();
            Pinned { version, gradients }
        });
        pinned.version.share()
    }

    pub fn gradients(&self, id: ObjectId) -> Vec<Option<Tensor>> {
        let recorded = lock(&self.recorded);
        let pinned = recorded.modules.get(&id).map(|pinned| pinned.gradients.iter());
        pinned.map(|gradients| gradients.map(|g| g.as_ref().map(Tensor::shallow_clone)).collect()).unwrap_or_default()
    }

    /// Adds to the gradients of a module; `None` adds nothing.
    pub fn add_gradients(&self, id: ObjectId, new: impl Iterator<Item = Option<Tensor>>) {
        let mut recorded = lock(&self.recorded);
        let Some(pinned) = recorded.modules.get_mut(&id) else { return };
        for (sum, new) in pinned.gradients.iter_mut().zip(new) {
            *sum = match (sum.take(), new) {
                (Some(sum), Some(new)) => Some(sum + new),
                (sum, new) => sum.or(new),
            };
        }
    }

    /// Remembers that the context is open at another process, so that it can be ended there.
    pub fn opens_at(&self, endpoint: &Endpoint, session: Session) {
        if session != endpoint.shared().session && lock(&self.recorded).opened_at.insert(session) {
            lock(&endpoint.shared().holdings).add_context(session, self.id);
        }
    }

    /// Runs a module on inputs from another process and keeps the piece. The outputs are cut from it.
    pub fn record(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        id: ObjectId,
        module: &HostedModule,
        inputs: Vec<Tensor>,
    ) -> Result<(u64, Vec<Tensor>), RemoteError> {
        let version = self.pin(id, module);
        let context = Context::part_of(endpoint.clone(), Arc::clone(self));
        let outputs = module.forward(&Pass::new(Some(&context)), &version.tensors, &inputs)?;
        let mut tape = context.into_tape();
        tape.uses(id);
        let cut = outputs.iter().map(|t| if t.requires_grad() { leaf(t) } else { t.detach() }).collect();
        let mut recorded = lock(&self.recorded);
        recorded.last_piece += 1;
        let piece = recorded.last_piece;
        recorded.pieces.insert(piece, Piece { inputs, outputs, tape });
        Ok((piece, cut))
    }

    /// Takes a piece backwards: gradients of its outputs in, gradients of its inputs out.
    pub fn backward(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        piece: u64,
        gradients: Vec<Value>,
    ) -> Result<Vec<Value>, RemoteError> {
        let taken = lock(&self.recorded).pieces.remove(&piece);
        let Piece { inputs, outputs, tape } = taken.ok_or_else(|| {
            RemoteError::new(format!("the context has no call {piece} to take backwards; each goes backwards once"))
        })?;
        let gradients = gradients.into_iter().map(|value| Option::<Tensor>::from_values(vec![value]));
        let gradients = gradients.collect::<Result<Vec<_>, _>>()?;
        if gradients.len() != outputs.len() {
            let (found, want) = (gradients.len(), outputs.len());
            return Err(RemoteError::new(format!("{found} gradients came for {want} outputs")));
        }
        let roots = outputs.into_iter().zip(gradients).filter_map(|(output, g)| g.map(|g| (output, g))).collect();
        let (wanted, places): (Vec<_>, Vec<_>) =
            inputs.iter().enumerate().filter(|(_, t)| t.requires_grad()).map(|(i, t)| (t.shallow_clone(), i)).unzip();
        let mut values: Vec<_> = inputs.iter().map(|_| Value::Null).collect();
        for (place, gradient) in places.into_iter().zip(tape.backward(endpoint, self, roots, &wanted)?) {
            values[place] = gradient.into();
        }
        Ok(values)
    }

    /// The pinned parameters of a module as the leaves of a graph.
    pub fn leaves(&self, id: ObjectId) -> Vec<Tensor> {
        lock(&self.recorded).modules.get(&id).map(|pinned| share(&pinned.version.tensors)).unwrap_or_default()
    }

    /// True if nobody holds the context any more.
    fn leave(&self, holder: Session) -> bool {
        let mut recorded = lock(&self.recorded);
        recorded.holders.remove(&holder) && recorded.holders.is_empty()
    }

    /// Frees what was recorded, here and where calls from here opened the context.
    fn end(&self, endpoint: &Endpoint) {
        let recorded = std::mem::take(&mut *lock(&self.recorded));
        let shared = endpoint.shared();
        let mut holdings = lock(&shared.holdings);
        for &session in &recorded.opened_at {
            if holdings.remove_context(session, self.id)
                && let Some(link) = lock(&shared.peers).link_of(session)
            {
                link.send(proto::frame::Kind::EndContext(proto::EndContext { context: self.id }));
            }
        }
        drop(holdings);
        // After the lock: pieces may hold references, and dropping those takes it.
        drop(recorded);
    }
}
