//! Trainers that find each other by a server which is replaced.

use std::net::TcpListener;

use super::{Job, TIMEOUT};

#[test]
fn a_server_that_takes_the_place_of_another_knows_where_trainers_listen() {
    let mut job = Job::new();
    let (old, address) = job.server("ps-0");
    let trainer = job.client("trainer-1", &[("ps-0", &address)]);
    let own = trainer.publish(&trainer.peer("ps-0"), &address).expect("it listens");
    old.shutdown();

    let (_new, address) = job.server("ps-0");
    trainer.connect("ps-0", &address, TIMEOUT).expect("it is up");
    let other = job.client("trainer-0", &[("ps-0", &address)]);
    let found = other.locate(&other.peer("ps-0"), "trainer-1", TIMEOUT).expect("it was published again");
    assert_eq!(found, own);
}

#[test]
fn a_trainer_that_listens_elsewhere_is_looked_up_again() {
    let mut job = Job::new();
    let (_server, address) = job.server("ps-0");
    let old = job.client("trainer-0", &[("ps-0", &address)]);
    // Nobody answers where it listened.
    let left = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let left_address = left.local_addr().expect("it is bound").to_string();
    old.peer("ps-0").rpc_sync::<()>("psjobs/publish", left_address).expect("it is kept");
    old.shutdown();

    let observer = job.client("trainer-1", &[("ps-0", &address)]);
    let finds = std::thread::spawn(move || {
        let found = observer.connect_published(&observer.peer("ps-0"), "trainer-0", 3 * TIMEOUT)?;
        found.rpc_sync::<i64>("echo", 7_i64)
    });
    drop(left.accept().expect("the observer dials it"));
    let new = job.client("trainer-0", &[("ps-0", &address)]);
    new.publish(&new.peer("ps-0"), &address).expect("it listens");
    assert_eq!(finds.join().expect("it returns"), Ok(7));
}
