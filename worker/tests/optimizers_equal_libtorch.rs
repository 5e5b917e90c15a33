//! The servers' optimizers against libtorch's own, fed the same gradients for 100 steps. Those that
//! libtorch's bindings lack are compared with their formula, computed on tensors. A distributed optimizer's operations on tensors,
//! by which it steps parameters on a GPU, run here on tensors of the CPU.

use psjobs_api::training::{self, OptimizerKind};
use psjobs_arithmetic::optimizer::Optimizer;
use psjobs_rpc::autograd::TensorOptimizer;
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const ELEMENTS: i64 = 1000;
const STEPS: u64 = 100;

/// A gradient that depends on the weights and the step, without randomness.
fn gradient(weights: &Tensor, step: u64) -> Tensor {
    let phase = Tensor::arange(ELEMENTS, (Kind::Float, Device::Cpu)) * 0.37 + step as f64 * 0.11;
    phase.sin() * 0.5 + weights.detach() * 0.3
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor).expect("one dimension")
}

fn with_libtorch(spec: &training::Optimizer) -> Vec<f32> {
    let store = VarStore::new(Device::Cpu);
    let weights = store.root().var_copy("weights", &start());
    let mut local = Local::new(Flat::of(&store), spec).expect("libtorch takes the arguments");
    for step in 0..STEPS {
        // A loss whose gradient is the one wanted.
        let loss = (&weights * gradient(&weights, step)).sum(Kind::Float);
        local.step(step, &loss).expect("updated");
    }
    floats(&weights.detach())
}

fn with_servers(spec: &training::Optimizer) -> Vec<f32> {
    let optimizer = Optimizer::new(spec);
    let mut weights = floats(&start());
    let mut state = optimizer.state(weights.len());
    for step in 0..STEPS {
        let gradient = floats(&gradient(&Tensor::from_slice(&weights), step));
        let bytes: Vec<[u8; 4]> = gradient.iter().map(|value| value.to_le_bytes()).collect();
        optimizer.apply(&mut weights, &bytes, &mut state, 1.0);
    }
    weights
}

fn on_tensors(spec: &training::Optimizer) -> Vec<f32> {
    let optimizer = TensorOptimizer::new(spec);
    let mut weights = start();
    let mut state = optimizer.state(&weights);
    for step in 0..STEPS {
        weights = optimizer.apply(&weights, &gradient(&weights, step), &mut state);
    }
    floats(&weights)
}

fn start() -> Tensor {
    Tensor::linspace(-2.0, 2.0, ELEMENTS, (Kind::Float, Device::Cpu))
}

#[test]
fn updates_equal_libtorchs_over_100_steps() {
    let sgd = training::Optimizer { learning_rate: 0.05, ..Default::default() };
    let adam = training::Optimizer { kind: OptimizerKind::Adam, learning_rate: 0.01, ..Default::default() };
    let adamw = training::Optimizer { kind: OptimizerKind::AdamW, weight_decay: 0.01, ..adam.clone() };
    let rmsprop = training::Optimizer { kind: OptimizerKind::RmsProp, epsilon: 1e-4, ..adam.clone() };
    let rows = [
        ("sgd", sgd.clone()),
        ("sgd, weight decay", training::Optimizer { weight_decay: 0.01, ..sgd.clone() }),
        ("sgd, momentum", training::Optimizer { momentum: 0.9, ..sgd.clone() }),
        ("sgd, momentum, weight decay", training::Optimizer { momentum: 0.5, weight_decay: 0.01, ..sgd.clone() }),
        ("sgd, nesterov", training::Optimizer { momentum: 0.9, nesterov: true, ..sgd.clone() }),
        (
            "sgd, nesterov, weight decay",
            training::Optimizer { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..sgd },
        ),
        ("adam", adam.clone()),
        ("adam, weight decay", training::Optimizer { weight_decay: 0.01, ..adam.clone() }),
        ("adam, betas, epsilon", training::Optimizer { beta1: 0.8, beta2: 0.99, epsilon: 1e-4, ..adam.clone() }),
        ("adam, amsgrad", training::Optimizer { amsgrad: true, ..adam.clone() }),
        ("adamw", adamw.clone()),
        ("adamw, no decay", training::Optimizer { weight_decay: 0.0, ..adamw.clone() }),
        ("adamw, amsgrad", training::Optimizer { amsgrad: true, ..adamw }),
        ("rmsprop", rmsprop.clone()),
        ("rmsprop, weight decay", training::Optimizer { weight_decay: 0.01, ..rmsprop.clone() }),
        ("rmsprop, momentum", training::Optimizer { momentum: 0.9, ..rmsprop.clone() }),
        ("rmsprop, centered", training::Optimizer { centered: true, ..rmsprop.clone() }),
        ("rmsprop, all", training::Optimizer { centered: true, momentum: 0.5, weight_decay: 0.01, ..rmsprop }),
    ];
    for (label, spec) in rows {
        let servers = with_servers(&spec);
        assert_equal(label, &with_libtorch(&spec), &servers);
        let tensors = on_tensors(&spec);
        assert_equal(&format!("{label}, on tensors"), &servers, &tensors);
        if spec.kind == OptimizerKind::Sgd {
            assert!(tensors == servers, "{label}: on tensors to the last bit");
        }
    }
}

/// Checks that both are equal but for rounding: libtorch's square root on a CPU rounds otherwise.
fn assert_equal(label: &str, want: &[f32], found: &[f32]) {
    for (place, (want, found)) in want.iter().zip(found).enumerate() {
        let error = (want - found).abs() / want.abs().max(1.0);
        assert!(error <= 1e-6, "{label}: element {place} is {found}, expected {want}");
    }
}

/// Adagrad in double precision, as its paper and `torch.optim.Adagrad` define it.
fn adagrad(spec: &training::Optimizer) -> Vec<f32> {
    let mut weights = start().to_kind(Kind::Double);
    let mut sum = weights.full_like(spec.initial_accumulator);
    for step in 0..STEPS {
        let gradient = gradient(&weights, step) + &weights * spec.weight_decay;
        sum += gradient.square();
        let rate = spec.learning_rate / (1.0 + step as f64 * spec.learning_rate_decay);
        weights -= gradient * rate / (sum.sqrt() + spec.epsilon);
    }
    floats(&weights.to_kind(Kind::Float))
}

#[test]
fn updates_equal_the_formula_where_libtorchs_bindings_have_none() {
    let base = training::Optimizer { kind: OptimizerKind::Adagrad, learning_rate: 0.05, ..Default::default() };
    let rows = [
        ("adagrad", base.clone()),
        ("adagrad, weight decay", training::Optimizer { weight_decay: 0.01, ..base.clone() }),
        ("adagrad, decaying rate", training::Optimizer { learning_rate_decay: 0.02, ..base.clone() }),
        ("adagrad, all", training::Optimizer { initial_accumulator: 0.3, epsilon: 1e-3, weight_decay: 0.1, ..base }),
    ];
    for (label, spec) in rows {
        let servers = with_servers(&spec);
        assert_equal(label, &adagrad(&spec), &servers);
        assert_equal(&format!("{label}, on tensors"), &servers, &on_tensors(&spec));
    }
}

#[test]
fn one_process_uses_the_servers_rule_where_libtorchs_bindings_have_none() {
    let adagrad = training::Optimizer { kind: OptimizerKind::Adagrad, learning_rate: 0.05, ..Default::default() };
    let ftrl = training::Optimizer { kind: OptimizerKind::Ftrl, learning_rate: 0.1, l1: 0.5, ..Default::default() };
    let still = training::Optimizer { learning_rate: 0.0, ..ftrl.clone() };
    let shrunk = training::Optimizer { beta: 0.5, l2: 0.1, ..ftrl.clone() };
    for (label, spec) in [("adagrad", adagrad), ("ftrl", ftrl), ("ftrl, no rate", still), ("ftrl, all", shrunk)] {
        let servers = with_servers(&spec);
        assert_equal(label, &servers, &with_libtorch(&spec));
        assert_equal(&format!("{label}, on tensors"), &servers, &on_tensors(&spec));
    }
}
