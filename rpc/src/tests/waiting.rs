//! The clock of a thread counts the time for which it waits for other processes, and no other time.

use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use super::super::autograd::{Context, DistributedOptimizer, ModuleRef};
use super::super::{Pending, WaitClock};
use super::{eventually, pair};
use psjobs_api::training::Optimizer;

#[test]
fn a_call_counts_from_when_it_is_waited_for() {
    let (_job, _, client) = pair();
    let object = client.peer("ps-0").remote("counter", 0_i64).expect("made");
    let (clock, start) = (WaitClock::start(), Instant::now());
    // The first answers may be there before the thread waits, on a busy machine.
    eventually("a wait is counted", || {
        object.rpc_sync::<()>("sleep", 10_i64).expect("it ends");
        clock.waited() > Duration::ZERO
    });
    let waited = clock.waited();
    assert!(waited <= start.elapsed());

    let pending: Pending<i64> = object.rpc_async("add", 5_i64).expect("sent");
    eventually("the answer is there", || pending.is_done());
    assert_eq!(clock.waited(), waited, "sent, and not waited for");
    assert_eq!(pending.wait(), Ok(5));
    assert_eq!(clock.waited(), waited, "there was nothing to wait for");

    std::thread::scope(|scope| drop(scope.spawn(|| object.rpc_sync::<()>("sleep", 10_i64).expect("it ends"))));
    assert_eq!(clock.waited(), waited, "another thread has waited");
}

#[test]
fn a_call_within_the_process_is_no_wait() {
    let (_job, _, client) = pair();
    let here = client.peer("trainer-0").remote("counter", 0_i64).expect("made");
    let clock = WaitClock::start();
    here.rpc_sync::<()>("sleep", 10_i64).expect("it ends");
    assert_eq!(clock.waited(), Duration::ZERO);
}

#[test]
fn a_connection_that_is_missing_is_waited_for() {
    let (_job, _, client) = pair();
    let clock = WaitClock::start();
    let away = client.peer("ps-1").timeout(Duration::from_millis(20)).rpc_async::<i64>("echo", 1_i64);
    assert!(away.is_err(), "it has not connected");
    assert!(clock.waited() > Duration::ZERO);
}

#[test]
fn modules_and_their_optimizer_are_waited_for_elsewhere_and_not_here() {
    let (_job, _, client) = pair();
    // The time that forward, backward and the optimizer waited.
    let step = |peer: &str| {
        let module = ModuleRef::new(client.peer(peer).remote("dense", 1_i64).expect("made"));
        let parameters = module.parameter_rrefs().expect("known");
        let arguments = Optimizer { learning_rate: 0.1, ..Optimizer::default() };
        let optimizer = DistributedOptimizer::new(&client, &parameters, &arguments).expect("made");
        let context = Context::new(&client);
        let clock = WaitClock::start();
        let input = Tensor::ones([64, 4], tch::kind::FLOAT_CPU);
        let loss = context.forward(&module, &[&input]).expect("forward").swap_remove(0).sum(Kind::Float);
        let forward = clock.waited();
        context.backward(&[&loss]).expect("backward");
        let backward = clock.waited() - forward;
        optimizer.step(&context).expect("step");
        [forward, backward, clock.waited() - forward - backward]
    };
    assert_eq!(step("trainer-0"), [Duration::ZERO; 3]);
    // An answer may be there before the thread waits, on a busy machine.
    eventually("each is waited for", || step("ps-0").iter().all(|part| *part > Duration::ZERO));
}
