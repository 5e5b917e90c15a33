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
use super::tensor_optimizer::{TensorOptimizer, TensorState};
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
    rules: Rules,
    /// The places of the parameters, and the optimizer's state of each.
    states: Vec<(usize, ParameterState)>,
}

/// The optimizer's state of one parameter, where the parameter is.
#[derive(Debug)]
enum ParameterState {
    /// On the CPU, where one pass over the floats is faster than one for each operation.
    Floats(State),
    /// On another device.
    Tensors(TensorState),
}

/// One optimizer, for parameters on the CPU and on other devices.
struct Rules {
    floats: Optimizer,
    tensors: TensorOptimizer,
}

impl Part {
    fn new(call: &Call, module: RRef, places: &[i64], arguments: &str) -> Result<Self, RemoteError> {
        let arguments: Arguments = serde_json::from_str(arguments)
            .map_err(|error| RemoteError::new(format!("the optimizer's arguments are unusable: {error}")))?;
        let (_, hosted) = call.endpoint.shared().objects.find(module.id())?;
        let hosted = HostedModule::of(hosted).ok_or_else(|| RemoteError::new(format!("{module} is not a module")))?;
        let rules = Rules::new(&arguments);
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
            states.push((place, rules.state(tensor, tensor.device())));
        }
        Ok(Self { module: hosted, reference: module, rules, states })
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
                    changed[*place] = Some(self.rules.apply(&current[*place], gradient, state)?);
                }
            }
            Ok(changed)
        })?;
        Ok(())
    }
}

impl Rules {
    fn new(arguments: &Arguments) -> Self {
        Self { floats: Optimizer::new(arguments), tensors: TensorOptimizer::new(arguments) }
    }

    /// Fresh state for a parameter on `device`.
    fn state(&self, parameter: &Tensor, device: Device) -> ParameterState {
        match device {
            Device::Cpu => ParameterState::Floats(self.floats.state(parameter.numel())),
            _ => ParameterState::Tensors(self.tensors.state(parameter)),
        }
    }

    /// Returns the next values of a parameter, which is not written: contexts in flight still use it.
    fn apply(&self, parameter: &Tensor, gradient: &Tensor, state: &mut ParameterState) -> Result<Tensor, RemoteError> {
        if gradient.is_sparse() {
            return Err(RemoteError::new("optimizers work with dense gradients, and this one is sparse"));
        }
        match state {
            ParameterState::Floats(state) => {
                let gradient = gradient.f_to_device(Device::Cpu)?.f_contiguous()?;
                let gradient = element_bytes(&gradient)?;
                if gradient.len() != parameter.numel() {
                    let (found, want) = (gradient.len(), parameter.numel());
                    let text = format!("a gradient of {found} elements came for a parameter of {want}");
                    return Err(RemoteError::new(text));
                }
                state.begin_step();
                changed(parameter, |range, weights| {
                    let (gradient, group) = (&gradient[range.clone()], ParameterGroup::default());
                    self.floats.apply_part(&range, weights, gradient, state, (1.0, &group));
                })
            }
            ParameterState::Tensors(state) => Ok(self.tensors.apply(parameter, gradient, state)),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps a parameter on the CPU, with state for `device`.
    fn values_after_steps(rules: &Rules, device: Device) -> Vec<Vec<f32>> {
        let ramp = |from: f64| (Tensor::arange(12, tch::kind::FLOAT_CPU) * 0.7 + from).sin().view([3, 4]);
        let mut parameter = ramp(0.0).set_requires_grad(true);
        let mut state = rules.state(&parameter, device);
        for step in 1..=20 {
            // Another order of its elements in memory.
            let gradient = ramp(f64::from(step)).view([4, 3]).transpose(0, 1);
            let before = parameter.copy();
            let next = rules.apply(&parameter, &gradient, &mut state).expect("dense");
            assert!(before.equal(&parameter), "contexts in flight use the values from before");
            parameter = next.set_requires_grad(true);
        }
        Vec::try_from(parameter.detach()).expect("two dimensions")
    }

    #[test]
    fn on_another_device_tensors_are_stepped_by_the_rule_of_the_cpu() {
        for kind in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "FTRL"] {
            let json = format!(r#"{{"type": "{kind}", "learningRate": 0.05}}"#);
            let rules = Rules::new(&serde_json::from_str(&json).expect("valid"));
            let parameter = Tensor::zeros([2], tch::kind::FLOAT_CPU);
            assert!(matches!(rules.state(&parameter, Device::Cpu), ParameterState::Floats(_)), "{kind}");
            assert!(matches!(rules.state(&parameter, Device::Cuda(0)), ParameterState::Tensors(_)), "{kind}");
            let (found, want) = (values_after_steps(&rules, Device::Cuda(0)), values_after_steps(&rules, Device::Cpu));
            for (found, want) in found.iter().flatten().zip(want.iter().flatten()) {
                assert!((found - want).abs() < 1e-6, "{kind}: {found} instead of {want}");
            }
        }
    }

    #[test]
    fn sparse_gradients_are_refused_on_every_device() {
        let rules = Rules::new(&serde_json::from_str("{}").expect("valid"));
        let parameter = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU);
        let gradient = parameter.to_sparse(None, None::<&[i64]>, None);
        for device in [Device::Cpu, Device::Cuda(0)] {
            let mut state = rules.state(&parameter, device);
            let error = rules.apply(&parameter, &gradient, &mut state).expect_err("sparse").to_string();
            assert!(error.contains("this one is sparse"), "{device:?}: {error}");
        }
    }
}
