//! Runs the Rust of docs/coming-from-torch-rpc.md, which quotes this file.

use tch::{Device, Kind, Tensor};

use super::super::autograd::{Context, DistributedOptimizer, ModuleRef};
use super::super::{Methods, Pending, Registry, RemoteError, RemoteObject};
use super::pair;

pub fn offer(registry: &mut Registry) {
    registry.function("add", |_, (a, b): (i64, i64)| Ok(a + b));
    registry.object("agent", |_, seed: i64| Ok(Agent::new(seed)));
}

struct Agent {
    seed: i64,
}

impl Agent {
    fn new(seed: i64) -> Self {
        Self { seed }
    }

    fn select_action(&self, state: &[f64]) -> Result<i64, RemoteError> {
        Ok(self.seed + state.len() as i64)
    }
}

impl RemoteObject for Agent {
    fn methods(methods: &mut Methods<Self>) {
        methods.add("select_action", |agent, _, state: Vec<f64>| agent.select_action(&state));
    }
}

#[test]
fn a_function_is_called_at_once_later_or_for_a_reference() -> Result<(), RemoteError> {
    let (_job, _, endpoint) = pair();
    let sum: i64 = endpoint.peer("ps-0").rpc_sync("add", (1, 2))?;
    let pending: Pending<i64> = endpoint.peer("ps-0").rpc_async("add", (1, 2))?;
    let later = pending.wait()?;
    let kept_there = endpoint.peer("ps-0").remote("add", (1, 2))?;
    assert_eq!((sum, later, kept_there.to_here::<i64>()?), (3, 3, 3));
    Ok(())
}

#[test]
fn an_object_is_made_and_called_by_name() -> Result<(), RemoteError> {
    let (_job, _, endpoint) = pair();
    let (seed, state) = (7_i64, vec![0.5, 0.25]);
    let rref = endpoint.peer("ps-0").remote("agent", seed)?;
    let action: i64 = rref.rpc_sync("select_action", state)?;
    assert_eq!((action, rref.owner(), rref.is_local()), (9, "ps-0", false));
    Ok(())
}

#[test]
fn a_context_takes_the_loss_of_a_remote_module_backwards() -> Result<(), RemoteError> {
    let (_job, _, endpoint) = pair();
    let network = ModuleRef::new(endpoint.peer("ps-0").remote("dense", 1)?);
    let arguments = serde_json::from_str(r#"{"learningRate": 0.05}"#).expect("an optimizer");
    let optimizer = DistributedOptimizer::new(&endpoint, &network.parameter_rrefs()?, &arguments)?;
    let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let y = Tensor::from_slice(&[1_i64, 3]);
    let before = network.parameters()?.swap_remove(0);
    let context = Context::new(&endpoint);
    let out = context.forward(&network, &[&x])?.swap_remove(0);
    let loss = out.nll_loss(&y);
    context.backward(&[&loss])?;
    let gradients = context.gradients(&network)?;
    optimizer.step(&context)?;
    let gradient = gradients[0].as_ref().expect("the module's parameter has a gradient");
    assert!(network.parameters()?[0].allclose(&(before - gradient * 0.05), 1e-6, 1e-6, false));
    Ok(())
}
