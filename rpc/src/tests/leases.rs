use std::sync::Arc;
use std::time::Duration;

use super::super::{Endpoint, RRef, Stats};
use super::{Job, LEASE, eventually, pair, stop};
use crate::connection::{Link, Process as _, attach, reconcile};
use crate::proto;
use crate::proto::frame::Kind;

fn held(endpoint: &Endpoint) -> (usize, u64) {
    let Stats { objects, references, .. } = endpoint.stats();
    (objects, references)
}

/// Leases are looked at four times in their length.
fn three_leases_pass(endpoint: &Endpoint) {
    let before = endpoint.stats().lease_checks;
    eventually("three leases have passed", || endpoint.stats().lease_checks > before + 12);
}

#[test]
fn an_object_is_freed_with_its_last_reference() {
    let (_job, server, client) = pair();
    let object = client.peer("ps-0").remote("counter", 0).expect("made");
    let clone = object.clone();
    assert_eq!(held(&server), (1, 1));
    drop(object);
    assert_eq!(clone.rpc_sync("add", 1), Ok(1_i64));
    drop(clone);
    eventually("freed", || held(&server) == (0, 0));
}

#[test]
fn a_reference_that_another_process_keeps_keeps_the_object() {
    let mut job = Job::with_lease(LEASE);
    let (first, first_address) = job.server("ps-0");
    let (second, second_address) = job.server("ps-1");
    second.connect("ps-0", &first_address, super::TIMEOUT).expect("it is up");
    let client = job.client("trainer-0", &[("ps-0", &first_address), ("ps-1", &second_address)]);
    let object = client.peer("ps-0").remote("counter", 0).expect("made");
    let keeper = client.peer("ps-1").remote("counter", 0).expect("made");
    keeper.rpc_sync::<()>("keep", Some(&object).cloned()).expect("kept");
    drop(object);
    three_leases_pass(&first);
    let object: Option<RRef> = keeper.rpc_sync("kept", ()).expect("it has it");
    assert_eq!(object.expect("it has it").rpc_sync("add", 1), Ok(1_i64));
    keeper.rpc_sync::<()>("keep", None::<RRef>).expect("dropped");
    eventually("freed", || held(&first) == (0, 0));
    drop(keeper);
    eventually("freed", || held(&second) == (0, 0));
}

#[test]
fn what_a_departed_process_held_is_freed() {
    let (_job, server, client) = pair();
    let object = client.peer("ps-0").remote("counter", 0).expect("made");
    client.shutdown();
    eventually("freed", || held(&server) == (0, 0));
    let error = object.rpc_sync::<i64>("add", 1).expect_err("it has ended").to_string();
    assert!(error.contains("cannot reach ps-0: trainer-0 is ending"), "{error}");
    let error = server.peer("trainer-0").rpc_sync::<i64>("echo", 1).expect_err("it has ended").to_string();
    assert_eq!(error, "function `echo` cannot reach trainer-0: trainer-0 has ended");
}

#[test]
fn a_call_awaits_the_process_that_takes_the_place_of_one_that_has_ended() {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let client = job.client("trainer-0", &[("ps-0", &address)]);
    server.peer("trainer-0").rpc_sync::<i64>("echo", 1).expect("it is there");
    client.shutdown();
    eventually("gone", || server.gone("trainer-0").is_some());
    let later = server.peer("trainer-0").await_replacement();
    let error = later
        .clone()
        .timeout(Duration::from_millis(100))
        .rpc_sync::<i64>("echo", 1)
        .expect_err("there is none")
        .to_string();
    assert_eq!(error, "function `echo` cannot reach trainer-0: trainer-0 has ended");
    let waits = std::thread::spawn(move || later.timeout(super::TIMEOUT).remote("counter", 0));
    let next = job.client("trainer-0", &[("ps-0", &address)]);
    let made = waits.join().expect("no panic").expect("made by the one that came");
    assert_eq!((held(&next), made.rpc_sync("add", 1)), ((1, 1), Ok(1_i64)));
}

#[test]
fn a_silent_process_loses_what_it_held() {
    let mut job = Job::with_lease(LEASE);
    let (server, address) = job.server("ps-0");
    let (client, thread) = job.stoppable_client("ps-0", &address);
    let object = client.peer("ps-0").remote("counter", 0).expect("made");
    let stopped = stop(&thread);
    eventually("freed", || held(&server) == (0, 0));
    drop(stopped);
    // It relies on what is gone, so it is refused when it connects again.
    let refused = || object.rpc_sync::<i64>("add", 1).expect_err("freed");
    eventually("refused", || refused().to_string().contains("ps-0 has let go of what trainer-0 held"));
    assert!(
        refused().is_peer_away(),
        "the trainer is to be started again, and has not failed by itself: {}",
        refused()
    );
    // Its successor begins anew.
    client.shutdown();
    let next = job.client("trainer-0", &[("ps-0", &address)]);
    assert_eq!(next.peer("ps-0").rpc_sync("echo", 1), Ok(1_i64));
}

#[test]
fn a_silent_process_that_lacks_nothing_goes_on() {
    let mut job = Job::with_lease(LEASE);
    let (server, address) = job.server("ps-0");
    let (client, thread) = job.stoppable_client("ps-0", &address);
    let shared = client.peer("ps-0").singleton("counter", 0).expect("made");
    let stopped = stop(&thread);
    eventually("silent for a lease", || server.gone("trainer-0").is_some());
    drop(stopped);
    eventually("answered", || shared.rpc_sync::<i64>("add", 1).is_ok());
}

#[test]
fn an_idle_process_keeps_what_it_holds() {
    let mut job = Job::with_lease(LEASE);
    let (server, address) = job.server("ps-0");
    let client = job.client("trainer-0", &[("ps-0", &address)]);
    let object = client.peer("ps-0").remote("counter", 0).expect("made");
    three_leases_pass(&server);
    assert_eq!(object.rpc_sync("add", 1), Ok(1_i64));
}

#[test]
fn notices_of_a_connection_that_was_replaced_do_not_count() {
    let (_job, server, client) = pair();
    let made = client.peer("ps-0").remote("counter", 0).expect("made");
    let object = made.id();
    let shared = server.shared();
    let connect = |count| {
        let (session, held_at) = (7, server.connections().session);
        let held = vec![proto::Held { object, count }];
        let hello = proto::Hello { name: "trainer-7".into(), session, held_at, held, ..proto::Hello::default() };
        reconcile(&**shared, &hello).expect("it relies on nothing that is gone");
        let link = Arc::new(Link::new("trainer-7".into(), (session, 0), Link::channel().0));
        attach(&**shared, &link, None).expect("it is not superseded");
        link
    };
    let retain = |link: &Arc<Link>| Arc::clone(shared).receive(link, Kind::Retain(proto::Retain { object }));
    let release = |link: &Arc<Link>| Arc::clone(shared).receive(link, Kind::Release(proto::Release { object }));

    let old = connect(1);
    retain(&old);
    assert_eq!(held(&server), (1, 3), "one of the client, two of this peer");
    // Its second connection says 2. What it had sent before, on the first one, is read late.
    let new = connect(2);
    release(&old);
    retain(&old);
    retain(&old);
    assert_eq!(held(&server), (1, 3));
    release(&new);
    release(&new);
    assert_eq!(held(&server), (1, 1));

    // A process of the name that is new holds nothing, and the old one has nothing more to let go.
    retain(&new);
    server.connections().end_peer("trainer-7", "it is silent", true, |session| {
        shared.reconcile(session, &std::collections::HashMap::new(), &[]);
    });
    retain(&new);
    assert_eq!(held(&server), (1, 1));
}
