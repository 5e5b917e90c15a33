//! Many processes do many things, some of which fail, and nothing is left over.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::super::autograd::{Context, DistributedOptimizer, ModuleRef};
use super::super::{Endpoint, Pending, RRef, Stats};
use super::{Job, TIMEOUT, eventually};

const SERVERS: [&str; 2] = ["ps-0", "ps-1"];
const ROUNDS: usize = 150;

fn left(endpoint: &Endpoint) -> Stats {
    Stats { lease_checks: 0, ..endpoint.stats() }
}

#[test]
fn contexts_and_references_come_back_to_zero() {
    // A reference that is on its way from one process to another is held for the length of a lease.
    let mut job = Job::with_lease(Duration::from_secs(5));
    let servers = SERVERS.map(|name| job.server(name));
    let addresses = [0, 1].map(|i| (SERVERS[i], servers[i].1.as_str()));
    // Modules of the one call those of the other.
    servers[0].0.connect("ps-1", &servers[1].1, TIMEOUT).expect("it is up");
    let trainers: Vec<_> = (0..3).map(|i| job.client(&format!("trainer-{i}"), &addresses)).collect();
    std::thread::scope(|scope| {
        for (seed, trainer) in trainers.iter().enumerate() {
            scope.spawn(move || live(trainer, &mut ChaCha8Rng::seed_from_u64(seed as u64)));
        }
    });
    // The last one dies with everything that it has.
    let (lost, others) = trainers.split_last().expect("there are three");
    let module = ModuleRef::new(lost.peer("ps-0").remote("dense", 1).expect("made"));
    let object = lost.peer("ps-1").remote("counter", 1).expect("made");
    let context = Context::new(lost);
    let out = context.forward(&module, &[&Tensor::ones([3, 4], tch::kind::FLOAT_CPU)]).expect("forward");
    let alone = || left(&servers[0].0).contexts == 1 && left(&servers[1].0).objects == 1;
    eventually("only what the last one has is left", alone);
    lost.shutdown();
    let everyone = || servers.iter().map(|(server, _)| server).chain(others);
    eventually("nothing is left", || everyone().all(|endpoint| left(endpoint) == Stats::default()));
    drop((module, object, context, out));
    assert_eq!((lost.stats().objects, lost.stats().contexts), (0, 0));
}

/// Makes, passes on, uses and drops, in an order that the seed gives.
fn live(trainer: &Endpoint, random: &mut ChaCha8Rng) {
    let mut kept: Vec<RRef> = Vec::new();
    for _ in 0..ROUNDS {
        let peer = trainer.peer(SERVERS[random.random_range(0..2)]);
        match random.random_range(0..6) {
            0 => kept.push(peer.remote("counter", 1).expect("made")),
            1 => {
                // The owner itself gets a reference, and lets it go.
                let object: RRef = peer.remote("counter", 5).expect("made");
                assert_eq!(peer.rpc_sync("whose", &object), Ok(peer.name().to_owned()));
            }
            2 => {
                let pending: Pending<i64> = peer.rpc_async("echo", 1).expect("sent");
                // The test does not wait for it.
                drop(pending);
            }
            3 => {
                let object = peer.remote("counter", 1).expect("made");
                for method in ["fail", "panic", "no such method"] {
                    object.rpc_sync::<()>(method, ()).expect_err("it cannot work");
                }
            }
            4 => train(trainer, random.random()),
            _ => kept.truncate(random.random_range(0..=kept.len())),
        }
    }
}

/// A step through a module that calls one of another process; one of two goes no further than forward.
fn train(trainer: &Endpoint, backward: bool) {
    let inner = ModuleRef::new(trainer.peer("ps-1").remote("dense", 2).expect("made"));
    let relay = ModuleRef::new(trainer.peer("ps-0").remote("relay", inner.rref()).expect("made"));
    let arguments = serde_json::from_str(r#"{"learningRate": 0.05}"#).expect("valid");
    let parameters = [inner.parameter_rrefs().expect("known"), relay.parameter_rrefs().expect("known")].concat();
    let optimizer = DistributedOptimizer::new(trainer, &parameters, &arguments).expect("made");
    let context = Context::new(trainer);
    context.forward(&inner, &[&Tensor::ones([3, 5], tch::kind::FLOAT_CPU)]).expect_err("the shapes do not fit");
    let out = context.forward(&relay, &[&Tensor::ones([3, 4], tch::kind::FLOAT_CPU)]).expect("forward").swap_remove(0);
    if backward {
        context.backward(&[&out.sum(Kind::Float)]).expect("backward");
        optimizer.step(&context).expect("step");
    }
}
