//! Processes of one name and different incarnations.

use super::super::{Endpoint, RemoteError, Settings};
use super::{Job, TIMEOUT, eventually};

fn incarnation(job: &mut Job, incarnation: u32) -> Endpoint {
    job.start(Settings { incarnation, ..job.settings("trainer-0") })
}

#[test]
fn a_replaced_process_is_refused_and_its_successor_is_not_disturbed() {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let old = incarnation(&mut job, 1);
    let object = old.connect("ps-0", &address, TIMEOUT).expect("it is up").remote("counter", 0).expect("made");
    let new = incarnation(&mut job, 2);
    let peer = new.connect("ps-0", &address, TIMEOUT).expect("it is up");

    eventually("the old process learns it", || old.gone("ps-0").is_some());
    let error = object.rpc_sync::<i64>("add", 1).expect_err("replaced");
    assert!(matches!(error, RemoteError::Unreachable { .. }), "{error}");
    let want = "trainer-0 was replaced: this is its incarnation 1, and 2 has connected before";
    assert!(error.to_string().ends_with(want), "{error}");

    let late = incarnation(&mut job, 1);
    let error = late.connect("ps-0", &address, TIMEOUT).map(drop).expect_err("replaced").to_string();
    assert!(error.ends_with(want), "{error}");
    assert_eq!(server.stats().objects, 0, "what the old one held is freed");
    assert_eq!(peer.rpc_sync("echo", 3), Ok(3_i64));
}

#[test]
fn a_successor_is_known_also_after_it_has_left() {
    let mut job = Job::new();
    let (_, address) = job.server("ps-0");
    let new = incarnation(&mut job, 2);
    new.connect("ps-0", &address, TIMEOUT).expect("it is up");
    new.shutdown();
    let old = incarnation(&mut job, 1);
    let error = old.connect("ps-0", &address, TIMEOUT).map(drop).expect_err("replaced").to_string();
    assert!(error.contains("was replaced"), "{error}");
    let next = incarnation(&mut job, 3);
    next.connect("ps-0", &address, TIMEOUT).expect("it is newer");
}
