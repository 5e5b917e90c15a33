use std::time::{Duration, Instant};

use bytes::Bytes;
use tch::{Kind, Tensor};

use super::super::{Endpoint, Pending, RRef, RemoteError, Settings, Value, Values, connection};
use super::{Job, TIMEOUT, eventually, pair};

fn counter(endpoint: &Endpoint, peer: &str, start: i64) -> RRef {
    endpoint.peer(peer).remote("counter", start).expect("made")
}

#[test]
fn an_object_answers_its_calls_in_order() {
    let (_job, _, client) = pair();
    let object = counter(&client, "ps-0", 10);
    assert_eq!(object.owner(), "ps-0");
    let calls: Vec<Pending<i64>> = (0..100).map(|n| object.rpc_async("add", n).expect("sent")).collect();
    let mut sum = 10;
    for (n, call) in (0..).zip(calls) {
        sum += n;
        assert_eq!(call.wait(), Ok(sum));
    }
    assert_eq!(object.rpc_sync("caller", ()), Ok("trainer-0".to_owned()));
}

#[test]
fn every_kind_of_value_comes_back_as_it_went() {
    let (_job, _, client) = pair();
    let tensor = Tensor::arange(6, (Kind::BFloat16, tch::Device::Cpu)).view([2, 3]);
    let sent = vec![
        Value::Null,
        true.into(),
        (-5_i64).into(),
        2.5_f64.into(),
        "text".into(),
        Bytes::from_static(b"\0\xff").into(),
        (&tensor).into(),
        vec![1_i64, 2].into(),
    ];
    let want: Vec<_> = sent.iter().map(|value| format!("{value:?}")).collect();
    let Values(back) = client.peer("ps-0").rpc_sync("echo", Values(sent)).expect("echoed");
    let found: Vec<_> = back.iter().map(|value| format!("{value:?}")).collect();
    assert_eq!(found, want);
    let Value::Tensor(back) = &back[6] else { panic!("a tensor was sent") };
    assert!(back.equal(&tensor));
}

#[test]
fn the_server_calls_back_into_the_caller_while_it_waits() {
    let (_job, server, client) = pair();
    let (here, there) = (counter(&client, "trainer-0", 100), counter(&client, "ps-0", 0));
    assert!(here.is_local() && !there.is_local());
    assert_eq!(there.rpc_sync("ask", (&here, 5)), Ok(105_i64));
    assert_eq!(server.peer("trainer-0").rpc_sync("whose", &here), Ok("trainer-0".to_owned()));
}

#[test]
fn quick_methods_keep_their_place_among_the_others() {
    let (_job, server, client) = pair();
    let object = counter(&client, "ps-0", 0);
    let slow: Pending<()> = object.rpc_async("sleep", 20).expect("sent");
    let calls: Vec<Pending<i64>> =
        (1..=100).map(|n| object.rpc_async(if n % 3 == 0 { "add" } else { "add_quickly" }, n).expect("sent")).collect();
    slow.wait().expect("it ends");
    for (n, call) in (1..).zip(calls) {
        assert_eq!(call.wait(), Ok(n * (n + 1) / 2), "call {n}");
    }
    // Also between threads of the owner itself, nothing is lost.
    let here = counter(&server, "ps-0", 0);
    std::thread::scope(|scope| {
        for method in ["add", "add_quickly", "add_quickly"] {
            let here = &here;
            scope.spawn(move || {
                for _ in 0..500 {
                    here.rpc_sync::<i64>(method, 1).expect("counted");
                }
            });
        }
    });
    assert_eq!(here.rpc_sync("add_quickly", 0), Ok(1500_i64));
}

#[test]
fn a_quick_method_that_waits_or_panics_is_reported() {
    let (_job, _, client) = pair();
    let (here, there) = (counter(&client, "trainer-0", 0), counter(&client, "ps-0", 0));
    let error = there.rpc_sync::<i64>("ask_quickly", (&here, 1)).expect_err("it would wait").to_string();
    assert!(error.contains("a quick method waits for `counter.add`"), "{error}");
    let error = there.rpc_sync::<()>("panic_quickly", ()).expect_err("it panics").to_string();
    assert!(error.contains("panicked: index 3 is out of range"), "{error}");
    assert_eq!(there.rpc_sync("ask", (&here, 1)), Ok(2_i64), "the first call to the other went through");
}

#[test]
fn a_value_stays_there_until_it_is_fetched() {
    let (_job, _, client) = pair();
    let value = client.peer("ps-0").remote("echo", (1_i64, "two")).expect("made");
    assert_eq!(value.to_here(), Ok((1_i64, "two".to_owned())));
    let object = counter(&client, "ps-0", 0);
    let error = object.to_here::<i64>().expect_err("an object is no value");
    assert!(error.to_string().contains("no method is called `to_here`; there are: add, add_quickly, ask,"), "{error}");
}

#[test]
fn a_singleton_is_made_once() {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let one = job.client("trainer-0", &[("ps-0", &address)]);
    let two = job.client("trainer-1", &[("ps-0", &address)]);
    let make = |endpoint: &Endpoint| endpoint.peer("ps-0").singleton("counter", 1).expect("made");
    let objects: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = [&one, &two, &server].map(|endpoint| scope.spawn(move || make(endpoint))).into();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(objects.iter().all(|object| *object == objects[0]));
    assert_eq!(objects[0].rpc_sync("add", 1), Ok(2_i64));
    drop(objects);
    assert_eq!(one.peer("ps-0").singleton("counter", 7).expect("found").rpc_sync("add", 1), Ok(3_i64));
}

#[test]
fn what_went_wrong_there_is_reported_here() {
    let (_job, _, client) = pair();
    let object = counter(&client, "ps-0", 0);
    let peer = client.peer("ps-0");
    let error = |result: Result<(), RemoteError>| result.expect_err("it cannot work").to_string();
    let rows = [
        (error(object.rpc_sync("fail", ())), "`counter.fail` on ps-0 failed: the disk is full"),
        (error(object.rpc_sync("panic", ())), "`counter.panic` on ps-0 failed: panicked: index 3 is out of range"),
        (
            error(object.rpc_sync("addd", 1)),
            "`counter.addd` on ps-0 failed: no method is called `addd`; there are: add,",
        ),
        (error(object.rpc_sync("add", "1")), "value 0: expected an integer, found a text"),
        (error(object.rpc_sync("add", (1, 2))), "expected 1 values, found 2"),
        (
            error(object.rpc_sync("add", Tensor::zeros([2, 3], (Kind::Double, tch::Device::Cpu)))),
            "`counter.add` on ps-0 failed: value 0: expected an integer, found a Double tensor of shape [2, 3]",
        ),
        (error(object.rpc_sync("add", 1)), "`counter.add` on ps-0 failed: its result is unexpected: expected 0 values"),
        (
            error(peer.rpc_sync("ecco", ())),
            "function `ecco` on ps-0 failed: no function is called `ecco`; there are: add, echo",
        ),
        (
            error(peer.remote("count", ()).map(drop)),
            "construction of `count` on ps-0 failed: no constructor or function is called `count`; there are: ",
        ),
        (error(peer.remote("counter", ()).map(drop)), "expected 1 values, found 0"),
    ];
    for (found, want) in rows {
        assert!(found.contains(want), "{found}\nshould have: {want}");
    }
    assert_eq!(object.rpc_sync("add", 1), Ok(2_i64), "the object lives on");
}

#[test]
fn an_error_of_a_nested_call_names_the_whole_way() {
    let (_job, _, client) = pair();
    let (here, there) = (counter(&client, "trainer-0", 0), counter(&client, "ps-0", 0));
    let echo = client.peer("trainer-0").remote("echo", 1_i64).expect("made");
    let error = there.rpc_sync::<i64>("ask", (&echo, 1)).expect_err("a value has no add").to_string();
    assert_eq!(
        error,
        "`counter.ask` on ps-0 failed: `echo.add` on trainer-0 failed: `echo` gave a plain value, which has only `to_here`"
    );
    assert_eq!(there.rpc_sync("ask", (&here, 1)), Ok(1_i64));
}

#[test]
fn a_call_ends_with_its_deadline() {
    let (_job, _, client) = pair();
    let object = counter(&client, "ps-0", 0).timeout(Duration::from_millis(50));
    let slow: Pending<()> = object.rpc_async("sleep", 3_000).expect("sent");
    let error = object.rpc_sync::<i64>("add", 1).expect_err("the object is busy");
    assert_eq!(
        error.to_string(),
        "`counter.add` on ps-0 gave no answer within 50ms; raise the timeout if it needs longer"
    );
    assert!(error.is_retryable());
    drop(slow);
    let patient = object.timeout(TIMEOUT);
    assert_eq!(patient.rpc_sync("add", 1), Ok(1_i64), "the call that came too late was not run");
}

#[test]
fn calls_to_a_dead_peer_end_with_its_name_and_others_are_served() {
    let mut job = Job::new();
    let ((first, one), (_, two)) = (job.server("ps-0"), job.server("ps-1"));
    let client = job.client("trainer-0", &[("ps-0", &one), ("ps-1", &two)]);
    let (dead, alive) = (counter(&client, "ps-0", 0), counter(&client, "ps-1", 0));
    let under_way: Pending<()> = dead.rpc_async("sleep", 60_000).expect("sent");
    first.shutdown();
    let short = dead.timeout(Duration::from_millis(300));
    for (what, error) in [
        ("under way", under_way.wait().expect_err("no server answers")),
        ("later", short.rpc_sync::<i64>("add", 1).expect_err("no server answers")),
    ] {
        let error = error.to_string();
        assert!(error.contains("ps-0") && error.contains("counter."), "{what}: {error}");
    }
    assert_eq!(alive.rpc_sync("add", 1), Ok(1_i64));
}

#[test]
fn processes_that_do_not_belong_together_refuse_each_other() {
    let mut job = Job::new();
    let (_, address) = job.server("ps-0");
    let stranger = job.start(Settings::new("trainer-0", "other"));
    let error = stranger.connect("ps-0", &address, TIMEOUT).expect_err("another job").to_string();
    assert!(error.contains(r#"trainer-0 is of job "other", ps-0 of job "test""#), "{error}");
    let friend = job.start(Settings::new("trainer-1", "test"));
    let error = friend.connect("ps-1", &address, TIMEOUT).expect_err("another server").to_string();
    assert!(error.contains("the process there is ps-0; check the order of the addresses"), "{error}");
    let unreachable =
        || friend.connect("ps-1", "127.0.0.1:1", Duration::from_millis(300)).expect_err("no server").to_string();
    eventually("refused by the kernel", || {
        unreachable().contains("connection to 127.0.0.1:1 cannot reach ps-1: Connection refused")
    });
}

#[test]
fn many_threads_share_one_connection() {
    let (_job, server, client) = pair();
    let object = counter(&client, "ps-0", 0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let tensor = Tensor::ones([1000], tch::kind::FLOAT_CPU);
                    let back: Tensor = client.peer("ps-0").rpc_sync("echo", &tensor).expect("echoed");
                    assert_eq!(back.sum(Kind::Float).double_value(&[]), 1000.0);
                    object.rpc_sync::<i64>("add", 1).expect("counted");
                }
            });
        }
    });
    assert_eq!(object.rpc_sync("add", 0), Ok(1600_i64));
    assert_eq!((client.stats().calls, server.stats().calls), (0, 0));
}

#[test]
fn more_calls_than_fit_wait_for_their_turn() {
    let (_job, _, client) = pair();
    let object = counter(&client, "ps-0", 0);
    let calls: Vec<Pending<i64>> = (0..3000).map(|_| object.rpc_async("add", 1).expect("sent in time")).collect();
    assert_eq!(calls.into_iter().last().expect("there are some").wait(), Ok(3000));
}

#[test]
fn the_call_after_a_lost_one_waits_for_the_new_connection() {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let client = job.start(job.settings("trainer-0"));
    let peer = client.connect("ps-0", &address, TIMEOUT).expect("it is up");
    let mut lost = 0;
    for _ in 0..500 {
        let link = connection::link_to(server.connections(), "trainer-0", "a break", Instant::now() + TIMEOUT, false)
            .expect("connected");
        link.close("the cable was pulled");
        // Unless the new connection was quicker.
        lost += i32::from(peer.rpc_sync::<i64>("echo", 1).is_err());
        assert_eq!(peer.rpc_sync("echo", 2), Ok(2_i64));
    }
    assert!(lost > 0);
}

#[test]
fn two_processes_that_dial_each_other_keep_one_connection() {
    let mut job = Job::new();
    let (first, first_address) = job.server("trainer-0");
    let (second, second_address) = job.server("trainer-1");
    let to_second = first.connect("trainer-1", &second_address, TIMEOUT).expect("it is up");
    let to_first = second.connect("trainer-0", &first_address, TIMEOUT).expect("it is up");
    // The second connection has replaced the first one, which is not made again.
    eventually("both have settled", || {
        to_second.rpc_sync("echo", 1) == Ok(1_i64) && first.absence("trainer-1").is_none()
    });
    for n in 0..500_i64 {
        assert_eq!(to_second.rpc_sync("echo", n), Ok(n));
        assert_eq!(to_first.rpc_sync("echo", n), Ok(n));
    }
    assert_eq!(first.absence("trainer-2").map(|absence| absence.ended), Some(false));
}
