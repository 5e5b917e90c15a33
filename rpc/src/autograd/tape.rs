//! The reverse pass over one process's stretch of the graph. Tensors that came out of remote calls are
//! leaves of the local graph; where the pass arrives at one, the owner takes its piece backwards and
//! the pass goes on from what the call was given.

use std::collections::BTreeSet;
use std::sync::Arc;

use tch::Tensor;

use super::super::object_table::ObjectId;
use super::super::target::Target;
use super::super::{Endpoint, FromValues, RRef, RemoteError, Value};
use super::contexts::ContextState;

/// The remote calls that were made from one stretch of local graph, in order, and the local modules
/// whose parameters it used.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    calls: Vec<RemoteCall>,
    modules: BTreeSet<ObjectId>,
}

#[derive(Debug)]
pub(crate) struct RemoteCall {
    pub module: RRef,
    pub piece: u64,
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<Tensor>,
}

impl Tape {
    pub fn record(&mut self, call: RemoteCall) {
        self.calls.push(call);
    }

    pub fn uses(&mut self, module: ObjectId) {
        self.modules.insert(module);
    }

    /// Takes `roots` (tensors and their gradients) backwards. Gradients of the local modules go to the
    /// context; those of `inputs` are returned.
    pub fn backward(
        &self,
        endpoint: &Endpoint,
        context: &Arc<ContextState>,
        roots: Vec<(Tensor, Tensor)>,
        inputs: &[Tensor],
    ) -> Result<Vec<Option<Tensor>>, RemoteError> {
        let parameters: Vec<_> = self.modules.iter().map(|&id| (id, context.leaves(id))).collect();
        let outputs = self.calls.iter().flat_map(|call| &call.outputs);
        let leaves = inputs.iter().chain(parameters.iter().flat_map(|(_, tensors)| tensors)).chain(outputs);
        let mut gradients = Gradients::new(leaves);
        gradients.add(&roots)?;
        let mut end = gradients.sums.len();
        for call in self.calls.iter().rev() {
            let start = end - call.outputs.len();
            let of_outputs: Vec<_> = gradients.sums[start..end].iter_mut().map(Option::take).collect();
            end = start;
            if of_outputs.iter().any(Option::is_some) {
                let of_inputs = call.backward(endpoint, context, of_outputs)?;
                gradients.add(&of_inputs)?;
            }
        }
        let mut sums = gradients.sums.into_iter();
        let of_inputs = sums.by_ref().take(inputs.len()).collect();
        for (id, tensors) in &parameters {
            context.add_gradients(*id, sums.by_ref().take(tensors.len()));
        }
        Ok(of_inputs)
    }
}

impl RemoteCall {
    /// The owner's part: gradients of the outputs there, gradients of the inputs back.
    fn backward(
        &self,
        endpoint: &Endpoint,
        context: &ContextState,
        gradients: Vec<Option<Tensor>>,
    ) -> Result<Vec<(Tensor, Tensor)>, RemoteError> {
        let arguments = gradients.into_iter().map(Value::from).collect();
        let target = Target::Backward { piece: self.piece };
        let sent = endpoint.send_call(&self.module.destination(), target, Some(context.id), arguments)?;
        let mut roots = Vec::new();
        for (input, value) in self.inputs.iter().zip(sent.wait()?.values) {
            let gradient = Option::<Tensor>::from_values(vec![value])?;
            roots.extend(gradient.map(|gradient| (input.shallow_clone(), gradient)));
        }
        Ok(roots)
    }
}

/// Sums of gradients at the leaves of a graph.
struct Gradients {
    leaves: Vec<Tensor>,
    /// Place in `sums` of each leaf: those that need no gradient have none.
    places: Vec<usize>,
    sums: Vec<Option<Tensor>>,
}

impl Gradients {
    fn new<'a>(all: impl Iterator<Item = &'a Tensor>) -> Self {
        let (mut leaves, mut places, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for (place, tensor) in all.enumerate() {
            sums.push(None);
            if tensor.requires_grad() {
                leaves.push(tensor.shallow_clone());
                places.push(place);
            }
        }
        Self { leaves, places, sums }
    }

    /// Adds what `roots` contribute. The sum of output x gradient is a scalar whose derivative is exact,
    /// bit for bit: libtorch's binding starts from scalars only.
    fn add(&mut self, roots: &[(Tensor, Tensor)]) -> Result<(), RemoteError> {
        let mut scalars = Vec::new();
        for (root, gradient) in roots.iter().filter(|(root, _)| root.requires_grad()) {
            if root.size() != gradient.size() || root.kind() != gradient.kind() {
                let (want, found) = ((root.kind(), root.size()), (gradient.kind(), gradient.size()));
                return Err(RemoteError::new(format!("a gradient is {found:?}, its tensor {want:?}")));
            }
            scalars.push((root * gradient.to_device(root.device())).sum(root.kind()));
        }
        if scalars.is_empty() || self.leaves.is_empty() {
            return Ok(());
        }
        // The graph is kept: later rounds may pass the same nodes. It is freed with its tensors.
        let new = Tensor::f_run_backward(&scalars, &self.leaves, true, false)?;
        for (&place, new) in self.places.iter().zip(new).filter(|(_, new)| new.defined()) {
            let sum = &mut self.sums[place];
            *sum = Some(match sum.take() {
                Some(sum) => sum + new,
                None => new,
            });
        }
        Ok(())
    }
}
