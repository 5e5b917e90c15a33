//! The binary as people start it: roles by hand, one process each.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::Command;

use crate::process::{command, end, free_port, read, run, start, terminate};

#[test]
fn one_server_and_two_trainers_train_mnist() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 3 --master-port {}", free_port());
    let result = |name: &str| folder.path().join(name);
    let server = start(&format!("serve {place} --learning-rate 0.01 --momentum 0.9"), &result("server"));
    let trainers = [1, 2].map(|rank| {
        let args = format!("train mnist {place} --rank {rank} --max-steps 120 --log-every 40 --device cpu");
        start(&args, &result(&format!("trainer-{rank}")))
    });
    for trainer in trainers {
        let (code, log) = end(trainer);
        assert_eq!(code, Some(0), "{log}");
        assert!(log.contains("training step=120 total_steps=120 loss="), "{log}");
    }
    let (code, log) = end(server);
    assert_eq!(code, Some(0), "{log}");

    let first = read(&result("trainer-1"));
    assert!(first.metrics["accuracy"] >= 0.9, "{first:?}");
    assert!(first.metrics["loss"].is_finite() && first.waiting_seconds.is_some(), "{first:?}");
    let second = read(&result("trainer-2"));
    assert!(!second.metrics.contains_key("accuracy"), "only the first trainer evaluates: {second:?}");
    let server = read(&result("server"));
    assert_eq!((server.steps, server.examples), (240, 240 * 32));
    assert_eq!(server.metrics["accuracy"], first.metrics["accuracy"]);
}

#[test]
fn a_trainer_alone_needs_no_server() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let result = folder.path().join("result");
    let (code, log) = end(start("train mlp --local --learning-rate 0.1 --max-steps 1000", &result));
    assert_eq!(code, Some(0), "{log}");
    let result = read(&result);
    assert_eq!((result.steps, result.examples), (1000, 32_000));
    assert!(result.metrics["accuracy"] >= 0.9, "{result:?}");
}

#[test]
fn a_trainer_alone_takes_every_optimizer() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for flags in [
        "--optimizer sgd --learning-rate 0.1 --momentum 0.9 --nesterov",
        "--optimizer adam --learning-rate 0.001 --amsgrad",
        "--optimizer adamw --learning-rate 0.001 --weight-decay 0.01",
        "--optimizer adagrad --initial-accumulator 0.1 --learning-rate-decay 0.001",
        "--optimizer rmsprop --learning-rate 0.001 --alpha 0.9 --centered",
        "--optimizer ftrl --learning-rate 0.05 --beta 1 --l1 0.001 --l2 0.001",
    ] {
        let result = folder.path().join("result");
        let (code, log) = end(start(&format!("train mlp --local --max-steps 150 {flags}"), &result));
        assert_eq!(code, Some(0), "{flags}: {log}");
        assert!(read(&result).metrics["accuracy"] >= 0.7, "{flags}: {log}");
    }
}

#[test]
fn sigterm_ends_a_trainer_after_its_step_and_a_server_at_once() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let port = free_port();
    let result = folder.path().join("result");
    let server = start(&format!("serve --master-port {port}"), &result);
    let mut trainer =
        start(&format!("train mlp --master-port {port} --epochs 1000000 --log-every 1 --log-format json"), &result);
    let mut lines = BufReader::new(trainer.0.stderr.take().expect("piped")).lines();
    let training = lines.by_ref().find(|line| line.as_ref().expect("text").contains(r#""message":"training""#));
    assert!(training.is_some(), "the trainer logs its steps");

    terminate(&trainer);
    assert_eq!(lines.map(|line| line.expect("text")).filter(|line| line.contains("panick")).count(), 0);
    assert_eq!(trainer.0.wait().expect("it ends").code(), Some(143));

    terminate(&server);
    let (code, log) = end(server);
    assert_eq!(code, Some(143), "{log}");
    assert!(!result.exists(), "neither did its work");
}

#[test]
fn what_cannot_work_is_one_sentence_and_exit_code_2() {
    let empty = tempfile::tempdir().expect("temporary folder");
    let empty = empty.path().display();
    let rows = [
        ("train mnist --world-size 1".to_owned(), "at least 2"),
        ("train mnist --world-size 3 --rank 7".into(), "the ranks are 0 to 2"),
        ("train mnist --world-size 3".into(), "give --rank"),
        ("train mnist --rank 0".into(), "psjobs-worker serve"),
        ("serve --rank 1".into(), "psjobs-worker train"),
        ("serve --momentum 7".into(), "momentum"),
        ("serve --nesterov".into(), "momentum"),
        ("serve --optimizer adagrad --beta1 0.5".into(), "Adagrad has no such argument"),
        ("train mlp --local --optimizer lion".into(), "adamw, adagrad, rmsprop, ftrl"),
        ("serve --master-addr 127.0.0.1 --server-addrs nowhere".into(), "host:port"),
        (format!("train mlp --data {empty}"), "make mnist"),
        ("train mlp --batch-size 60000 --world-size 3 --rank 1".into(), "120000"),
        ("train mlp --momentum 0.9".into(), "give its flags to `serve`"),
        ("train mlp --local --momentum 7".into(), "momentum"),
        ("train mlp --local --rank 1".into(), "cannot be used with"),
        ("train mlp --device tpu".into(), "cuda:0"),
        ("train mlp --num-gpus 99".into(), "--num-gpus is 99"),
        ("train mlp --local --adaptive-batch".into(), "cannot be used with"),
        ("train mlp --local --micro-batches 5".into(), "a batch of 32 examples has no 5 micro-batches of one size"),
        ("train mlp --local --batch-size 2 --micro-batches 4".into(), "a number that divides it"),
        ("serve --adaptive-batch --consistency sync --backup-trainers 1".into(), "remove one of the two"),
        ("train mlp --example-ms -1".into(), "milliseconds"),
        ("train nothing".into(), "unrecognized subcommand"),
    ];
    for (args, want) in rows {
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(2), "{args}: {said}");
        let last =
            said.lines().filter(|line| line.starts_with("psjobs-worker: ") || line.starts_with("error: ")).count();
        assert_eq!(last, 1, "one sentence for {args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}

#[test]
fn what_another_start_may_find_otherwise_is_one_sentence_and_exit_code_1() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken_port = taken.local_addr().expect("bound").port();
    let unused = free_port();
    let rows = [
        (format!("serve --master-port {taken_port}"), "is in use"),
        (format!("serve --master-port {unused} --metrics-port {taken_port}"), "--metrics-port"),
    ];
    for (args, want) in rows {
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(1), "{args}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("psjobs-worker: ")).count(), 1, "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}

#[test]
fn a_server_that_other_machines_reach_without_tls_warns_in_one_sentence() {
    for (host, warnings) in [("0.0.0.0", 1), ("127.0.0.1", 0)] {
        let args = format!("serve --master-addr {host} --master-port {} --abandon-timeout 1", free_port());
        let (_, said) = run(&mut command(&args));
        let warned = said.lines().filter(|line| line.contains("WARN") && line.contains("without TLS")).count();
        assert_eq!(warned, warnings, "{host}: {said}");
    }
}

#[test]
fn damaged_data_is_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(folder.path().join("train-images-idx3-ubyte"), b"<html>not found</html>").expect("written");
    let (code, said) = run(command("train mlp --local --data").arg(folder.path()));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("train-images-idx3-ubyte is damaged: it begins with 3c68746d"), "{said}");
}

#[test]
fn flags_against_the_jobs_environment_are_refused() {
    let vars = [
        ("PSJOB_NAME", "mnist"),
        ("PSJOB_NAMESPACE", "default"),
        ("PSJOB_UID", "1"),
        ("PSJOB_ROLE", "trainer"),
        ("PSJOB_INDEX", "1"),
        ("PSJOB_SERVERS", "localhost:1"),
        ("PSJOB_TRAINERS", "2"),
        ("PSJOB_TRAINING", "{}"),
    ];
    let rows = [
        ("train mlp --rank 1", "--rank is 1, but the environment of job mnist says 2"),
        ("serve", "start it with `psjobs-worker train`"),
        ("train mlp --local", "leave it out"),
    ];
    for (args, want) in rows {
        let (code, said) = run(command(args).envs(vars));
        assert_eq!(code, Some(2), "{args}: {said}");
        assert!(said.contains(want), "{args}: {said}");
    }
    let (code, said) = run(command("train mlp").envs(vars).env("PSJOB_INDEX", "2"));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("PSJOB_INDEX is \"2\"; expected a number below 2"), "{said}");
}

#[test]
fn a_diverged_training_fails_with_exit_code_1() {
    let (code, said) = run(&mut command("train mlp --local --learning-rate 1000 --max-steps 200"));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("lower the learning rate"), "{said}");
}

#[test]
fn a_libtorch_of_another_version_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (source, library) = (folder.path().join("other.c"), folder.path().join("libother.so"));
    // Stands before libtorch and says that it is 2.10.1.
    let code = "unsigned long long aoti_torch_abi_version(void) { return 0x020a010000000000ULL; }";
    std::fs::write(&source, code).expect("written");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(compiled.expect("a C compiler").success());
    let (code, said) = run(command("train mlp --local").env("LD_PRELOAD", &library));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("found 2.10.1") && said.contains("LIBTORCH"), "{said}");
}
