//! Examples dealt out by the trainers' measured speed: a trainer that is slow for good reads fewer of them. That it is
//! waited for no longer follows from the shares (`ps/src/batch/sharing.rs` has the test); times are not compared here,
//! because a busy machine changes them.

use std::path::Path;

use crate::process::{all_end_well, end, free_port, read, start};
use psjobs_api::ReplicaResult;

/// Two trainers in Sync, the second of which takes three times as long; what each of them did.
fn train(flag: &str, folder: &Path) -> [ReplicaResult; 2] {
    let place = format!("--world-size 3 --master-port {}", free_port());
    let bounds = if flag.is_empty() { "" } else { "--batch-size 16" };
    let server = start(&format!("serve {place} --consistency sync {bounds} {flag}"), &folder.join("server"));
    let trainers = [1, 2].map(|rank| {
        let speed = "--batch-size 16 --example-ms 1 --slow 1:3";
        let args = format!("train mlp {place} --rank {rank} --max-steps 120 --device cpu {speed} {flag}");
        start(&args, &folder.join(format!("trainer-{rank}")))
    });
    all_end_well(trainers.into_iter().chain([server]));
    [1, 2].map(|rank| read(&folder.join(format!("trainer-{rank}"))))
}

#[test]
fn a_trainer_slow_for_good_reads_fewer_examples() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let [fast, slow] = train("", folder.path());
    assert_eq!((fast.examples, slow.examples), (120 * 16, 120 * 16));

    let [fast, slow] = train("--adaptive-batch", folder.path());
    assert_eq!(fast.examples + slow.examples, 2 * 120 * 16, "a step has as many examples as before");
    assert!(fast.examples > slow.examples, "{} and {}", fast.examples, slow.examples);
    assert!(fast.metrics["accuracy"] > 0.5, "{fast:?}");
}

#[test]
fn a_server_whose_batches_are_fixed_says_so() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let port = free_port();
    for (serve, train, want) in [
        ("", "--adaptive-batch", "start server 0 with --adaptive-batch"),
        ("--adaptive-batch", "--adaptive-batch --batch-size 5", "the job's batch.base is 32"),
    ] {
        let server = start(&format!("serve --master-port {port} {serve}"), &folder.path().join("server"));
        let trainer = start(&format!("train mlp --master-port {port} {train}"), &folder.path().join("trainer"));
        let (code, log) = end(trainer);
        assert_eq!(code, Some(2), "{log}");
        assert!(log.contains(want), "{log}");
        drop(server);
    }
}
