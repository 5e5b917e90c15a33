use tch::{Device, Kind, Tensor};

use super::super::autograd::{Context, DistributedOptimizer, Module, ModuleRef, Parameters, Pass};
use super::super::{Endpoint, RRef, Registry, RemoteError};
use super::{Job, LEASE, eventually, pair, stop};

/// tanh(x W), and a second output that is not differentiable.
struct Dense;

impl Module for Dense {
    fn forward(&self, _: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let out = inputs[0].matmul(&parameters[0]).tanh();
        let top = out.argmax(1, false);
        Ok(vec![out, top])
    }
}

/// Passes its input through a module of another process, and adds its own weight.
struct Relay(ModuleRef);

impl Module for Relay {
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let hidden = &inputs[0] * &parameters[0];
        let there = pass.forward(&self.0, &[&hidden])?.swap_remove(0);
        Ok(vec![there + hidden])
    }
}

pub fn offer(registry: &mut Registry) {
    registry.module("dense", |_, seed: i64| Ok((Dense, Parameters::new().with("weight", weight(seed)))));
    registry.module("relay", |_, module: RRef| {
        Ok((Relay(ModuleRef::new(module)), Parameters::new().with("scale", ramp([4], 9))))
    });
}

/// Values that differ from one another, without a random generator that tests would share.
fn ramp<const N: usize>(shape: [i64; N], seed: i64) -> Tensor {
    let n: i64 = shape.iter().product();
    ((Tensor::arange(n, (Kind::Float, Device::Cpu)) * 0.7 + seed).sin() * 0.5).view(&shape[..])
}

fn weight(seed: i64) -> Tensor {
    ramp([4, 4], seed)
}

fn dense(endpoint: &Endpoint, peer: &str, seed: i64) -> ModuleRef {
    ModuleRef::new(endpoint.peer(peer).remote("dense", seed).expect("made"))
}

fn assert_close(found: &Tensor, want: &Tensor, what: &str) {
    let error = (found - want).abs().max().double_value(&[]);
    assert!(error < 1e-6, "{what}: off by {error}");
}

#[test]
fn gradients_through_remote_and_local_pieces_equal_local_ones() {
    let mut job = Job::new();
    let (_, a) = job.server("ps-0");
    let (_, b) = job.server("ps-1");
    let client = job.client("trainer-0", &[("ps-0", &a), ("ps-1", &b)]);
    let here = client.module(Dense, Parameters::new().with("weight", weight(1)));
    let modules = [
        dense(&client, "ps-0", 2),
        here,
        dense(&client, "ps-1", 3),
        dense(&client, "ps-0", 4),
        dense(&client, "ps-0", 5),
    ];
    let x = ramp([3, 4], 50);

    // Local, remote, a fork and a join, one module twice, and a branch that the loss does not see.
    let run = |f: &dyn Fn(usize, &Tensor) -> Tensor| {
        let h = f(0, &x);
        let left = f(2, &(f(1, &h) * 2.0));
        let right = f(3, &h);
        let unused = f(4, &right);
        drop(unused);
        (f(2, &(left * &right)) + right).square().sum(Kind::Float)
    };
    let context = Context::new(&client);
    let loss = run(&|i, x| context.forward(&modules[i], &[x]).expect("forward").swap_remove(0));
    context.backward(&[&loss]).expect("backward");

    let weights: Vec<_> = [2, 1, 3, 4, 5].map(|seed| weight(seed).set_requires_grad(true)).into();
    let local = run(&|i, x| x.matmul(&weights[i]).tanh());
    let want = Tensor::run_backward(&[&local], &weights, false, false);
    assert_close(&loss, &local, "loss");
    for (i, module) in modules.iter().enumerate() {
        match context.gradients(module).expect("known")[0].as_ref() {
            Some(found) => assert_close(found, &want[i], &format!("module {i}")),
            None => assert!(i == 4 && !want[i].defined(), "module {i} has no gradient"),
        }
    }
}

#[test]
fn a_context_is_over_when_a_peer_has_freed_it() {
    let mut job = Job::with_lease(LEASE);
    let (server, address) = job.server("ps-0");
    let (client, thread) = job.stoppable_client("ps-0", &address);
    // The module is there for good; only what the context recorded is gone.
    let module = ModuleRef::new(client.peer("ps-0").singleton("dense", 2).expect("made"));
    let context = Context::new(&client);
    let out = context.forward(&module, &[&ramp([3, 4], 50)]).expect("forward").swap_remove(0);
    let stopped = stop(&thread);
    eventually("silent for a lease", || server.gone("trainer-0").is_some());
    drop(stopped);
    let loss = out.square().sum(Kind::Float);
    let refused = || context.backward(&[&loss]).expect_err("what it needs is gone");
    eventually("refused", || refused().to_string().contains("ps-0 has let go of what trainer-0 held"));
    assert!(
        refused().is_peer_away(),
        "the trainer is to be started again, and has not failed by itself: {}",
        refused()
    );
}

#[test]
fn a_module_that_calls_another_process_is_one_piece_of_the_graph() {
    let mut job = Job::new();
    let (far, far_address) = job.server("ps-1");
    let (near, near_address) = job.server("ps-0");
    near.connect("ps-1", &far_address, super::TIMEOUT).expect("it is up");
    let client = job.client("trainer-0", &[("ps-0", &near_address), ("ps-1", &far_address)]);
    let inner = dense(&client, "ps-1", 2);
    let relay = ModuleRef::new(client.peer("ps-0").remote("relay", inner.rref()).expect("made"));
    let x = ramp([3, 4], 50);

    let context = Context::new(&client);
    let out = context.forward(&relay, &[&x]).expect("forward").swap_remove(0);
    context.backward(&[&out.square().sum(Kind::Float)]).expect("backward");

    let (scale, w) = (ramp([4], 9).set_requires_grad(true), weight(2).set_requires_grad(true));
    let hidden = &x * &scale;
    let local = (hidden.matmul(&w).tanh() + hidden).square().sum(Kind::Float);
    let want = Tensor::run_backward(&[local], &[scale, w], false, false);
    let of = |module| context.gradients(module).expect("known")[0].as_ref().expect("it has one").shallow_clone();
    assert_close(&of(&relay), &want[0], "relay");
    assert_close(&of(&inner), &want[1], "inner");

    drop(context);
    eventually("the context ends everywhere", || [&far, &near, &client].iter().all(|e| e.stats().contexts == 0));
}

#[test]
fn evaluation_records_nothing() {
    let (_job, server, client) = pair();
    let module = dense(&client, "ps-0", 1);
    let out = module.evaluate(&[&ramp([3, 4], 5)]).expect("forward");
    assert!(!out[0].requires_grad());
    assert_eq!((out[1].kind(), server.stats().contexts), (Kind::Int64, 0));
}

#[test]
fn what_cannot_go_backwards_is_reported() {
    let (_job, _, client) = pair();
    let module = dense(&client, "ps-0", 1);
    let x = ramp([3, 4], 5);
    let context = Context::new(&client);
    let error = context.forward(&module, &[&ramp([3, 5], 5)]).expect_err("shapes do not fit").to_string();
    assert_eq!(
        error,
        "`dense.forward` on ps-0 failed: panicked: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x4)"
    );
    let double = context.forward(&module, &[&x.to_kind(Kind::Double)]).expect_err("another type").to_string();
    assert!(double.contains("`dense.forward` on ps-0 failed") && double.contains("same dtype"), "{double}");
    let out = context.forward(&module, &[&x]).expect("forward").swap_remove(0);
    let error = context.backward(&[&out]).expect_err("not a scalar").to_string();
    assert_eq!(error, "a loss must be one number, this one has shape [3, 4]");
    let error = context.backward(&[&x.sum(Kind::Float)]).expect_err("not recorded").to_string();
    assert_eq!(error, "the loss depends on no module that was called through the context");
    let loss = out.sum(Kind::Float);
    context.backward(&[&loss]).expect("backward");
    let error = context.backward(&[&loss]).expect_err("it went already").to_string();
    assert!(error.contains("backward of call 1 of `dense` on ps-0 failed: the context has no call 1"), "{error}");
}

#[test]
fn four_trainers_on_one_module_each_get_the_gradients_of_their_version() {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let trainers: Vec<_> = (0..4).map(|i| job.client(&format!("trainer-{i}"), &[("ps-0", &address)])).collect();
    let steps = 25;
    let most_steps_between = std::thread::scope(|scope| {
        let threads: Vec<_> = trainers
            .iter()
            .enumerate()
            .map(|(rank, trainer)| scope.spawn(move || train(trainer, rank as i64, steps)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("exact gradients")).max()
    });
    assert!(most_steps_between > Some(0), "no trainer's step fell between another's forward and backward");
    let module = ModuleRef::new(trainers[0].peer("ps-0").singleton("dense", 1).expect("found"));
    assert_eq!(module.rref().rpc_sync("version", ()), Ok(4 * steps));
    drop(module);
    drop(trainers);
    eventually("nothing is left", || (server.stats().contexts, server.stats().references) == (0, 0));
}

/// Checks every context against a local model at its version. Gives the most steps of others that
/// fell between a forward and its backward.
fn train(trainer: &Endpoint, rank: i64, steps: i64) -> i64 {
    let module = ModuleRef::new(trainer.peer("ps-0").singleton("dense", 1).expect("made"));
    let parameters = module.parameter_rrefs().expect("known");
    let arguments = serde_json::from_str(r#"{"learningRate": 0.05, "momentum": 0.5}"#).expect("valid");
    let optimizer = DistributedOptimizer::new(trainer, &parameters, &arguments).expect("made");
    let mut most = 0;
    for step in 0..steps {
        let x = ramp([8, 4], 100 * rank + step);
        let context = Context::new(trainer);
        let out = context.forward(&module, &[&x]).expect("forward").swap_remove(0);
        let again = context.forward(&module, &[&out]).expect("forward").swap_remove(0);
        let loss = again.square().sum(Kind::Float);
        context.backward(&[&loss]).expect("backward");

        let w = context.parameters(&module).expect("pinned").swap_remove(0).set_requires_grad(true);
        let local = x.matmul(&w).tanh().matmul(&w).tanh().square().sum(Kind::Float);
        let want = Tensor::run_backward(&[&local], &[&w], false, false);
        assert_close(&loss, &local, "loss");
        let found = context.gradients(&module).expect("known").swap_remove(0).expect("it has one");
        assert_close(&found, &want[0], "gradient");

        let version = context.version(&module).expect("known");
        optimizer.step(&context).expect("step");
        most = most.max(module.rref().rpc_sync::<i64>("version", ()).expect("known") - version - 1);
    }
    most
}

#[test]
fn a_dead_trainer_leaves_no_context_behind() {
    let (_job, server, client) = pair();
    let module = dense(&client, "ps-0", 1);
    let context = Context::new(&client);
    context.forward(&module, &[&ramp([3, 4], 5)]).expect("forward");
    assert_eq!(server.stats().contexts, 1);
    client.shutdown();
    eventually("freed", || (server.stats().contexts, server.stats().objects) == (0, 0));
}
