//! Trainers that find each other by a server which is replaced.

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
