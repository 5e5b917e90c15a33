//! Runs the reverse pass over one process's stretch of the graph. Tensors that came out of remote calls are
//! leaves of the local graph; where the pass arrives at one, the owner takes its piece backwards and
//! the pass goes on from what the call was given.

use std::sync::Arc;

use tch::Tensor;

use super::context::Context;
use crate::error::RemoteError;
use crate::objects::{ContextState, FromValues, Piece, RemoteCall, Tape, Target, Value};

impl Tape {
    /// Takes `roots` (tensors and their gradients) backwards. Gradients of the local modules go to the
    /// context; those of `inputs` are returned. If `is_last`, nothing goes backwards through this graph again.
    fn backward(
        &self,
        context: &Arc<ContextState>,
        roots: Vec<(Tensor, Tensor)>,
        inputs: &[Tensor],
        is_last: bool,
    ) -> Result<Vec<Option<Tensor>>, RemoteError> {
        let parameters: Vec<_> = self.modules.iter().map(|&id| (id, context.leaves(id))).collect();
        let outputs = self.calls.iter().flat_map(|call| &call.outputs);
        let leaves = inputs.iter().chain(parameters.iter().flat_map(|(_, tensors)| tensors)).chain(outputs);
        // The gradient of each remote call is one more round, which may pass nodes of the rounds before.
        let mut gradients = Gradients::new(leaves, !is_last || !self.calls.is_empty());
        gradients.add(&roots)?;
        let mut end = gradients.sums.len();
        for call in self.calls.iter().rev() {
            let start = end - call.outputs.len();
            let of_outputs: Vec<_> = gradients.sums[start..end].iter_mut().map(Option::take).collect();
            end = start;
            if of_outputs.iter().any(Option::is_some) {
                let of_inputs = call.backward(context, of_outputs)?;
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

impl Context {
    /// Takes everything that `losses` depend on backwards; gradients add to those of earlier calls.
    /// Each recorded call goes backwards once.
    ///
    /// # Errors
    /// A loss that is not a scalar or depends on nothing recorded; what went wrong with a piece.
    pub fn backward(&self, losses: &[&Tensor]) -> Result<(), RemoteError> {
        for loss in losses {
            if loss.numel() != 1 {
                let shape = loss.size();
                return Err(RemoteError::new(format!("a loss must be one number, this one has shape {shape:?}")));
            }
            if !loss.requires_grad() {
                return Err(RemoteError::new("the loss depends on no module that was called through the context"));
            }
        }
        let roots = losses.iter().map(|loss| (loss.shallow_clone(), loss.ones_like())).collect();
        let tape = std::mem::take(&mut *self.tape.lock());
        let result = tape.backward(&self.state, roots, &[], false);
        *self.tape.lock() = tape;
        result.map(|_| ())
    }
}

impl ContextState {
    /// Takes a piece backwards: gradients of its outputs in, gradients of its inputs out.
    pub fn backward(self: &Arc<Self>, piece: u64, gradients: Vec<Value>) -> Result<Vec<Value>, RemoteError> {
        let taken = self.take_piece(piece);
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
        for (place, gradient) in places.into_iter().zip(tape.backward(self, roots, &wanted, true)?) {
            values[place] = gradient.into();
        }
        Ok(values)
    }
}

impl RemoteCall {
    /// Sends the gradients of the outputs to the module's owner, and returns those of the inputs.
    fn backward(
        &self,
        context: &ContextState,
        gradients: Vec<Option<Tensor>>,
    ) -> Result<Vec<(Tensor, Tensor)>, RemoteError> {
        let arguments = gradients.into_iter().map(Value::from).collect();
        let target = Target::Backward { piece: self.piece };
        let sent = self.module.send_to(target, Some(context.id), arguments)?;
        let mut roots = Vec::new();
        for (input, value) in self.inputs.iter().zip(sent.wait()?.values) {
            let gradient = Option::<Tensor>::from_values(vec![value])?;
            roots.extend(gradient.map(|gradient| (input.shallow_clone(), gradient)));
        }
        Ok(roots)
    }
}

/// The sums of gradients at the leaves of a graph.
struct Gradients {
    leaves: Vec<Tensor>,
    /// Place in `sums` of each leaf: those that need no gradient have none.
    places: Vec<usize>,
    sums: Vec<Option<Tensor>>,
    /// The graph stays as it is; otherwise each node frees what it has kept of the forward pass when it is done, and the
    /// nodes after it use that memory.
    keeps_graph: bool,
}

impl Gradients {
    fn new<'a>(all: impl Iterator<Item = &'a Tensor>, keeps_graph: bool) -> Self {
        let (mut leaves, mut places, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for (place, tensor) in all.enumerate() {
            sums.push(None);
            if tensor.requires_grad() {
                leaves.push(tensor.shallow_clone());
                places.push(place);
            }
        }
        Self { leaves, places, sums, keeps_graph }
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
        let new = Tensor::f_run_backward(&scalars, &self.leaves, self.keeps_graph, false)?;
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

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::objects::Contexts;

    #[test]
    fn a_piece_that_went_backwards_has_freed_its_graph_if_no_more_rounds_follow() {
        let context = Contexts::default().open(1, 1);
        let input = Tensor::from_slice(&[1.0_f32, 2.0, 3.0]).set_requires_grad(true);
        let output = &input * &input;
        let piece =
            Piece { inputs: vec![input.shallow_clone()], outputs: vec![output.shallow_clone()], tape: Tape::default() };
        let number = context.add_piece(piece);
        let mut gradients = context.backward(number, vec![Value::from(&output.ones_like())]).expect("backwards");
        let found = Tensor::from_values(std::mem::take(&mut gradients)).expect("a tensor");
        assert_eq!(found, &input.detach() * 2.0);
        let again = Tensor::f_run_backward(&[output.sum(Kind::Float)], &[&input], false, false);
        assert!(again.is_err_and(|error| error.to_string().contains("backward through the graph a second time")));
    }
}
