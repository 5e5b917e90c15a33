//! Processes whose peer is away, or ends with an error.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use crate::process::{command, end, free_port, run, start};

#[test]
fn a_process_that_gives_up_on_its_peer_ends_with_exit_code_75() {
    let unused = free_port();
    let rows = [
        (format!("train mlp --master-port {unused} --connect-timeout 1"), "did not answer"),
        ("train mlp --master-addr no.such.host.invalid --connect-timeout 1".to_owned(), "no.such.host.invalid"),
        (format!("serve --master-port {unused} --abandon-timeout 1"), "missing: trainer 0 (never joined)"),
    ];
    for (args, want) in rows {
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(75), "{args}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("psjobs-worker: ")).count(), 1, "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}

#[test]
fn a_server_started_by_hand_ends_at_once_with_the_error_of_its_trainer() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 3 --master-port {}", free_port());
    let server =
        start(&format!("serve {place} --consistency sync --learning-rate 1000"), &folder.path().join("server"));
    let trainers = [1, 2].map(|rank| {
        let args = format!("train mlp {place} --rank {rank} --max-steps 100000 --device cpu --example-ms 1");
        start(&args, &folder.path().join("trainer"))
    });
    let begun = Instant::now();
    let (code, log) = end(server);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("ended with an error: the loss is"), "{log}");
    let logs = trainers.map(|trainer| {
        let (code, log) = end(trainer);
        assert_eq!(code, Some(1), "{log}");
        log
    });
    assert!(logs.iter().any(|log| log.contains("psjobs-worker: the loss is")), "{logs:?}");
    let took = begun.elapsed();
    println!("all three ended after {took:?}");
    assert!(took < Duration::from_secs(110), "no trainer waited until its time was over: {took:?}");
}

#[test]
fn a_supervised_server_waits_for_the_replacement_of_a_trainer_that_failed() {
    let port = free_port().to_string();
    let servers = format!("127.0.0.1:{port}");
    let vars = |role: &'static str| {
        [
            ("PSJOB_NAME", "diverges"),
            ("PSJOB_NAMESPACE", "default"),
            ("PSJOB_UID", "1"),
            ("PSJOB_ROLE", role),
            ("PSJOB_INDEX", "0"),
            ("PSJOB_TRAINERS", "1"),
            ("PSJOB_SUPERVISED", "1"),
            ("PSJOB_TRAINING", r#"{"optimizer": {"learningRate": 1000}}"#),
        ]
    };
    let trainer = |incarnation: &str| {
        let mut trainer = command("train mlp --max-steps 1000 --device cpu");
        trainer.envs(vars("trainer")).env("PSJOB_SERVERS", &servers).env("PSJOB_INCARNATION", incarnation);
        run(&mut trainer)
    };
    let mut server = command("serve");
    server.envs(vars("ps")).env("PSJOB_SERVERS", &servers).stderr(std::process::Stdio::piped());
    let mut server = crate::process::Worker(server.spawn().expect("the binary starts"));
    let mut lines = BufReader::new(server.0.stderr.take().expect("piped")).lines();
    for incarnation in ["0", "1"] {
        let (code, said) = trainer(incarnation);
        assert_eq!(code, Some(1), "{said}");
        let reported = lines.by_ref().map(|line| line.expect("text")).find(|line| line.contains("ended with an error"));
        assert!(reported.is_some_and(|line| line.contains("the loss is")), "the server hears of each");
    }
    assert_eq!(server.0.try_wait().expect("a child"), None, "it waits for the next one");
}
