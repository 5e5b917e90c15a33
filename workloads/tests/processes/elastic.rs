//! Elastic jobs as people start them: processes that come and go.

use std::io::{BufRead as _, BufReader};
use std::process::Command;

use crate::process::{Worker, command, end, free_port, read, run, start};

const BATCHES: u64 = 2 * 60_000 / 32;

/// Reads a trainer's log until it trains.
fn wait_until_it_trains(trainer: &mut Worker) -> std::thread::JoinHandle<()> {
    let mut lines = BufReader::new(trainer.0.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    assert!(lines.any(|line| line.contains("training step=")), "it ended before it trained");
    // Lines that no thread reads would fill the pipe.
    std::thread::spawn(move || lines.for_each(drop))
}

#[test]
fn mlp_learns_while_a_trainer_comes_and_another_goes() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 4 --min-trainers 1 --master-port {}", free_port());
    let result = |name: &str| folder.path().join(name);
    let server = start(&format!("serve {place} --consistency sync --learning-rate 0.2"), &result("server"));
    let begin = |rank: u32| {
        let args = format!("train mlp {place} --rank {rank} --epochs 2 --log-every 20 --device cpu --threads 1");
        start(&args, &result(&format!("trainer-{rank}")))
    };
    let (mut first, mut second) = (begin(1), begin(2));
    let logs = [&mut first, &mut second].map(wait_until_it_trains);
    let mut third = begin(3);
    let log = wait_until_it_trains(&mut third);
    // The one that was there first goes.
    let status = Command::new("kill").arg(first.0.id().to_string()).status().expect("kill is there");
    assert!(status.success());
    assert_eq!(first.0.wait().expect("it ends").code(), Some(143));
    assert!(!result("trainer-1").exists(), "it has not done its work");
    for mut trainer in [second, third] {
        assert_eq!(trainer.0.wait().expect("it ends").code(), Some(0));
    }
    logs.into_iter().chain([log]).for_each(|log| log.join().expect("no panic"));
    let (code, said) = end(server);
    assert_eq!(code, Some(0), "{said}");

    let [second, third] = [2, 3].map(|rank| read(&result(&format!("trainer-{rank}"))));
    let server = read(&result("server"));
    assert_eq!((server.steps, server.examples), (BATCHES, BATCHES * 32), "every batch was read once");
    assert!(third.steps > 0 && second.steps + third.steps < BATCHES, "{second:?} {third:?}");
    assert_eq!(server.metrics["accuracy"], second.metrics["accuracy"], "of those who ended the first counts");
    assert!(server.metrics["accuracy"] >= 0.9, "{server:?}");
}

#[test]
fn what_does_not_go_together_is_refused_in_one_sentence() {
    for (args, want) in [
        ("serve --min-trainers 1 --consistency sync --backup-trainers 1 --world-size 4", "remove backupTrainers"),
        ("serve --min-trainers 1 --adaptive-batch", "remove the adaptive batch"),
        ("serve --min-trainers 2", "--min-trainers 2 is more than the 1 trainers"),
        ("train mlp --min-trainers 1 --adaptive-batch", "remove the adaptive batch"),
        ("train mlp --min-trainers 1 --local", "--min-trainers"),
        ("train mnist-remote --min-trainers 1", "remove spec.elasticPolicy"),
        ("train cartpole --min-trainers 1 --world-size 3 --rank 1", "remove spec.elasticPolicy"),
        ("train rnn-remote --min-trainers 1", "remove spec.elasticPolicy"),
        ("train recsys --min-trainers 1", "remove spec.elasticPolicy"),
    ] {
        let (code, said) = run(&mut command(args));
        assert_eq!(code, Some(2), "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}
