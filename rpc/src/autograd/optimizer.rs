//! Optimizers that live beside the parameters they change.

use std::sync::Arc;

use psjobs_api::training::Optimizer as Arguments;
use psjobs_arithmetic::optimizer::{Optimizer, State};
use psjobs_arithmetic::parameter_group::ParameterGroup;
use tch::{Device, Kind, Tensor};

use super::context::Context;
use super::memory::{changed, element_bytes};
use super::module::HostedModule;
use super::module_ref::ParameterRef;
use crate::error::RemoteError;
use crate::objects::{Call, Endpoint, FromValues, Methods, RRef, Registry, RemoteObject};

const NAME: &str = "psjobs/optimizer";

/// One optimizer over parameters in several processes, with one state: each owner runs it on its own
/// part, so gradients and parameters stay where they are.
#[derive(Debug)]
pub struct DistributedOptimizer {
    parts: Vec<RRef>,
}

impl DistributedOptimizer {
    /// `arguments` are those of the job's own optimizer, `spec.training.optimizer`.
    ///
    /// # Errors
    /// Arguments that cannot work; what went wrong with a call.
    pub fn new(endpoint: &Endpoint, parameters: &[ParameterRef], arguments: &Arguments) -> Result<Self, RemoteError> {
        let arguments = serde_json::to_string(arguments)
            .map_err(|error| RemoteError::new(format!("the optimizer's arguments cannot be sent: {error}")))?;
        let mut parts = Vec::new();
        for first in parameters {
            let rest = parameters.iter().filter(|p| p.module == first.module);
            let places: Vec<_> = rest.map(|p| i64::try_from(p.index).unwrap_or(i64::MAX)).collect();
            if places.first() != i64::try_from(first.index).ok().as_ref() {
                continue;
            }
            let owner = endpoint.peer(first.module.rref().owner());
            parts.push(owner.remote(NAME, (first.module.rref(), places, arguments.as_str()))?);
        }
        Ok(Self { parts })
    }

    /// Makes the next version of every parameter that has a gradient in the context. Owners work side
    /// by side.
    ///
    /// # Errors
    /// If a call failed.
    pub fn step(&self, context: &Context) -> Result<(), RemoteError> {
        let steps: Vec<_> = self.parts.iter().map(|part| context.send(part, "step", Vec::new())).collect();
        for step in steps {
            <()>::from_values(step?.wait()?.values)?;
        }
        Ok(())
    }
}

/// The optimizer of one module's parameters, in the process that has them.
struct Part {
    module: Arc<HostedModule>,
    /// Keeps the module alive.
    reference: RRef,
    optimizer: Optimizer,
    /// The places of the parameters, and the optimizer's state of each.
    states: Vec<(usize, State)>,
}

impl Part {
    fn new(call: &Call, module: RRef, places: &[i64], arguments: &str) -> Result<Self, RemoteError> {
        let arguments: Arguments = serde_json::from_str(arguments)
            .map_err(|error| RemoteError::new(format!("the optimizer's arguments are unusable: {error}")))?;
        let (_, hosted) = call.endpoint.shared().objects.find(module.id())?;
        let hosted = HostedModule::of(hosted).ok_or_else(|| RemoteError::new(format!("{module} is not a module")))?;
        let optimizer = Optimizer::new(&arguments);
        let current = hosted.current().tensors;
        let mut states = Vec::new();
        for &place in places {
            let found = usize::try_from(place).ok().and_then(|place| Some((place, current.get(place)?)));
            let (place, tensor) =
                found.ok_or_else(|| RemoteError::new(format!("{module} has no parameter {place}")))?;
            if tensor.kind() != Kind::Float {
                let (name, kind) = (&hosted.names()[place], tensor.kind());
                return Err(RemoteError::new(format!("parameter {name} is {kind:?}; optimizers need Float")));
            }
            states.push((place, optimizer.state(tensor.numel())));
        }
        Ok(Self { module: hosted, reference: module, optimizer, states })
    }

    fn step(&mut self, call: &Call) -> Result<(), RemoteError> {
        let context = call.context.as_ref().ok_or_else(|| RemoteError::new("a step belongs to a context"))?;
        let gradients = context.gradients(self.reference.id());
        if gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        self.module.step(|current| {
            let mut changed: Vec<_> = current.iter().map(|_| None).collect();
            for (place, state) in &mut self.states {
                if let Some(gradient) = gradients.get(*place).and_then(Option::as_ref) {
                    changed[*place] = Some(apply(&self.optimizer, &current[*place], gradient, state)?);
                }
            }
            Ok(changed)
        })?;
        Ok(())
    }
}

/// Returns the next values of a parameter, which is not written: contexts in flight still use it.
fn apply(
    optimizer: &Optimizer,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &mut State,
) -> Result<Tensor, RemoteError> {
    let gradient = gradient.f_to_device(Device::Cpu)?.f_contiguous()?;
    let gradient = element_bytes(&gradient)?;
    if gradient.len() != parameter.numel() {
        let (found, want) = (gradient.len(), parameter.numel());
        return Err(RemoteError::new(format!("a gradient of {found} elements came for a parameter of {want}")));
    }
    state.begin_step();
    changed(parameter, |range, weights| {
        let (gradient, group) = (&gradient[range.clone()], ParameterGroup::default());
        optimizer.apply_part(&range, weights, gradient, state, (1.0, &group));
    })
}

impl RemoteObject for Part {
    fn methods(methods: &mut Methods<Self>) {
        methods.add("step", |part, call, ()| part.step(call));
    }
}

pub(crate) fn register(registry: &mut Registry) {
    registry.object(NAME, |call, (module, places, arguments): (RRef, Vec<i64>, String)| {
        Part::new(call, module, &places, &arguments)
    });
}
