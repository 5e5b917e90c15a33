//! Workloads whose processes call each other, as people start them.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::process::{Worker, all_end_well, command, end, free_port, kill, read, run, start, terminate};
use psjobs_api::{Environment, ReplicaResult, Training};

#[test]
fn four_trainers_train_the_network_on_the_server() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 5 --master-port {}", free_port());
    let result = |name: &str| folder.path().join(name);
    let server = start(&format!("serve {place}"), &result("server"));
    let trainers = [1, 2, 3, 4].map(|rank| {
        let args = format!(
            "train mnist-remote {place} --rank {rank} --max-steps 80 --log-every 40 --learning-rate 0.02 --momentum 0.5 \
             --num-gpus 0"
        );
        start(&args, &result(&format!("trainer-{rank}")))
    });
    for trainer in trainers {
        let (code, log) = end(trainer);
        assert_eq!(code, Some(0), "{log}");
        assert!(log.contains("training step=80 total_steps=80 loss="), "{log}");
    }
    let (code, log) = end(server);
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(log.matches("hosting the network").count(), 1, "one network for all trainers: {log}");

    let first = read(&result("trainer-1"));
    assert!(first.metrics["accuracy"] >= 0.85, "{first:?}");
    assert_eq!((first.steps, first.examples), (80, 80 * 32));
    let waiting = first.waiting_seconds.expect("it is measured");
    assert!(waiting > 0.0 && waiting < first.seconds, "{first:?}");
    let server = read(&result("server"));
    assert_eq!((server.steps, server.examples), (4 * 80, 4 * 80 * 32));
    assert_eq!(server.metrics["accuracy"], first.metrics["accuracy"]);
}

#[test]
fn two_trainers_train_the_network_on_two_servers() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let addresses = format!("localhost:{},localhost:{}", free_port(), free_port());
    let place = format!("--world-size 4 --server-addrs {addresses}");
    let result = |name: &str| folder.path().join(name);
    let servers = [0, 1].map(|rank| start(&format!("serve {place} --rank {rank}"), &result(&format!("server-{rank}"))));
    let trainers = [2, 3].map(|rank| {
        let args = format!(
            "train mnist-remote {place} --rank {rank} --max-steps 120 --learning-rate 0.02 --momentum 0.5 --num-gpus 0"
        );
        start(&args, &result(&format!("trainer-{rank}")))
    });
    for trainer in trainers {
        let (code, log) = end(trainer);
        assert_eq!(code, Some(0), "{log}");
    }
    for (server, layers) in servers.into_iter().zip(["conv1,conv2", "fc1,fc2"]) {
        let (code, log) = end(server);
        assert_eq!(code, Some(0), "{log}");
        assert!(log.contains(&format!("layers=\"{layers}\"")), "{layers}: {log}");
    }
    let first = read(&result("trainer-2"));
    assert!(first.metrics["accuracy"] >= 0.8, "{first:?}");
}

#[test]
fn what_cannot_work_is_one_sentence() {
    let unused = free_port();
    let rows = [
        ("train mnist-remote --num-gpus 3".to_owned(), 2, "3 is not in 0..=2"),
        ("train mnist-remote --momentum 7".into(), 2, "momentum"),
        // A server may be there when the trainer is started again.
        (format!("train mnist-remote --master-port {unused} --connect-timeout 1"), 75, "did not answer"),
        ("train mnist-remote --data /no/such/folder".into(), 2, "make mnist"),
    ];
    for (args, exit, want) in rows {
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(exit), "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}

#[test]
fn a_server_without_the_devices_says_so() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let port = free_port();
    // Killed when the test ends: its trainer never trains.
    let _server = start(&format!("serve --master-port {port}"), &folder.path().join("server"));
    let (code, said) = run(&mut command(&format!("train mnist-remote --master-port {port} --num-gpus 2")));
    if tch::Cuda::device_count() < 2 {
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("ps-0 sees") && said.contains("--num-gpus is 2"), "{said}");
    }
}

#[test]
fn a_server_that_would_leave_its_gpu_idle_says_what_to_change() {
    let servers = vec![format!("localhost:{}", free_port())];
    let environment = Environment { gpus: 1, ..Environment::new("job", "uid", servers, 1, Training::default()) };
    let mut rows = vec![("serve evaluate mlp", "remove the limit of GPUs")];
    // Where there is a GPU, this one serves.
    if tch::Cuda::device_count() == 0 {
        rows.push(("serve", "finds no CUDA device"));
    }
    for (args, want) in rows {
        let (code, said) = run(command(args).envs(environment.to_vars()));
        assert_eq!(code, Some(2), "{args}: {said}");
        assert!(said.contains(want) && said.contains("spec.ps.template"), "{args}: {said}");
    }
}

/// Runs an agent and one observer; what the agent left.
fn balance(folder: &Path, protocol: &str) -> ReplicaResult {
    let place = format!("--world-size 3 --master-port {}", free_port());
    let result = |name: &str| folder.join(format!("{protocol}-{name}"));
    let server = start(&format!("serve {place}"), &result("server"));
    let trainers = [1, 2].map(|rank| {
        let args =
            format!("train cartpole {place} --rank {rank} --protocol {protocol} --max-rounds 60 --measure-calls 100");
        start(&args, &result(&format!("trainer-{rank}")))
    });
    all_end_well(trainers.into_iter().chain([server]));
    let (agent, observer) = (read(&result("trainer-1")), read(&result("trainer-2")));
    assert_eq!(agent.steps, 60, "{agent:?}");
    assert!(observer.steps >= 60 * 8, "{observer:?}");
    let server = read(&result("server"));
    assert_eq!(server.metrics["running_reward"], agent.metrics["running_reward"]);
    assert_eq!(server.steps, agent.steps + observer.steps, "the server has the steps since the last heartbeats, too");
    agent
}

#[test]
fn both_protocols_learn_the_same() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (pair, packed) = (balance(folder.path(), "pair"), balance(folder.path(), "packed"));
    assert_eq!(pair.metrics["running_reward"], packed.metrics["running_reward"]);
    // An untrained policy stays near 21 for each episode, which makes 20 after 60.
    assert!(pair.metrics["running_reward"] > 25.0, "{pair:?}");
    assert!(pair.metrics["bare_calls_per_second"] > 0.0 && pair.metrics["solved"] == 0.0, "{pair:?}");
}

#[test]
fn a_lost_observer_is_replaced_and_the_others_go_on() {
    an_observer_is_replaced(drop);
}

/// As a pod does whose node is drained: the observer says goodbye before it ends.
#[test]
fn an_observer_that_is_asked_to_end_is_replaced_and_the_others_go_on() {
    an_observer_is_replaced(|observer| {
        terminate(&observer);
        let (code, log) = end(observer);
        assert_eq!(code, Some(143), "{log}");
    });
}

fn an_observer_is_replaced(take_away: impl FnOnce(Worker)) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 4 --master-port {}", free_port());
    let result = |name: &str| folder.path().join(name);
    let server = start(&format!("serve {place}"), &result("server"));
    let trainer = |rank: u32| format!("train cartpole {place} --rank {rank} --max-rounds 80 --log-every 5");
    let mut agent = start(&trainer(1), &result("agent"));
    let first = start(&trainer(2), &result("first"));
    let second = start(&trainer(3), &result("second"));
    let mut all = Vec::new();
    let log = BufReader::new(agent.0.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    let mut log = log.inspect(|line| all.push(line.clone()));
    assert!(log.any(|line| line.contains("training round=5 ")), "the agent logs its rounds");
    take_away(second);
    assert!(log.any(|line| line.contains("lost an observer")), "the agent sees it");
    let second = start(&trainer(3), &result("second"));
    log.for_each(drop);
    let code = agent.0.wait().expect("it ends").code();
    if code != Some(0) {
        let logs = [server, first, second].map(kill);
        panic!("the agent ended with {code:?}\n{}\n--- the others\n{}", all.join("\n"), logs.join("\n---\n"));
    }
    all_end_well([first, second, server]);
    assert_eq!(read(&result("agent")).steps, 80);
    assert!(read(&result("second")).steps > 0, "the one that came later took part");
}

#[test]
fn an_agent_needs_an_observer() {
    let (code, said) = run(&mut command("train cartpole"));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("at least 2 trainers"), "{said}");
}

#[test]
fn a_language_model_in_three_pieces_learns_a_text() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = folder.path().join("text.txt");
    let verse = "In the beginning God created the heaven and the earth. And the earth was without form, and void;\n";
    std::fs::write(&text, verse.repeat(120)).expect("written");
    let place = format!("--master-port {}", free_port());
    let result = |name: &str| folder.path().join(name);
    let server = start(&format!("serve {place}"), &result("server"));
    let sizes = "--width 16 --hidden 32 --batch-size 8 --length 10 --epochs 5 --learning-rate 2";
    let args = format!("train rnn-remote {place} {sizes} --data {}", text.display());
    let (code, log) = end(start(&args, &result("trainer")));
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = end(server);
    assert_eq!(code, Some(0), "{log}");
    let trainer = read(&result("trainer"));
    // 15 different words and marks; one that knew their frequencies alone would reach 12.9.
    assert!(trainer.metrics["perplexity"] < 8.0, "{trainer:?}");
    assert_eq!(read(&result("server")).metrics["perplexity"], trainer.metrics["perplexity"]);
}

#[test]
fn a_text_that_does_not_fit_is_one_sentence() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "In the beginning").expect("written");
    let short = format!("train rnn-remote --data {}", text.display());
    let rows = [
        ("train rnn-remote --data /no/such/text".to_owned(), "/no/such/text"),
        (short.clone(), "too few for --batch-size 32"),
        (format!("{short} --world-size 3 --rank 1"), "spec.trainer.replicas must be 1"),
    ];
    for (args, want) in rows {
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(2), "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}
