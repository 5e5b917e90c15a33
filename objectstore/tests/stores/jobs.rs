//! Real servers and trainers, whose checkpoints are in a bucket alone.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, Signal, kill_process};

use crate::store::{Kind, Store};

const STEPS: u32 = 300;
/// Times that the job is disturbed: its server by kill -9, and all of it by SIGTERM, in turn.
const PREEMPTIONS: u32 = 20;

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It has usually ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn worker(arguments: &str, variables: &[(String, String)]) -> Option<Command> {
    let Some(program) = std::env::var_os("PSJOBS_WORKER") else {
        assert!(std::env::var_os("PSJOBS_REQUIRE_OBJECT_STORES").is_none(), "PSJOBS_WORKER names no psjobs-worker");
        eprintln!("not tested: PSJOBS_WORKER names no psjobs-worker; `make test` does");
        return None;
    };
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).env("OMP_NUM_THREADS", "1").envs(variables.iter().cloned());
    command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Some(command)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port()
}

fn end(mut process: Process) -> (Option<i32>, String) {
    let mut log = String::new();
    if let Some(mut stream) = process.0.stderr.take() {
        stream.read_to_string(&mut log).expect("text");
    }
    (process.0.wait().expect("it ends").code(), log)
}

/// Trains for `STEPS` steps, in which an example takes so many milliseconds at least, through so many preemptions. Returns the
/// model, as bytes.
fn train(
    checkpoints: &str,
    variables: &[(String, String)],
    example_ms: u32,
    preemptions: u32,
    model: &Path,
) -> Option<Vec<u8>> {
    let port = free_port();
    let serve = format!(
        "serve --port {port} --master-port {port} --consistency sync --momentum 0.9 --checkpoint-interval 1 --checkpoint-dir {checkpoints}"
    );
    let train = format!("train mlp --device cpu --master-port {port} --max-steps {STEPS} --example-ms {example_ms}");
    let begin_training = || Some(Trainer::watch(worker(&train, &[])?));
    let mut trainer = begin_training()?;
    for number in 0..preemptions {
        let mut server = Process(worker(&serve, variables)?.spawn().expect("starts"));
        // It has written a checkpoint, so that the job goes on with each process.
        said(&mut server.0, "wrote a checkpoint");
        if number.is_multiple_of(2) {
            server.0.kill().expect("it runs");
            end(server);
            continue;
        }
        for process in [Pid::from_child(&server.0), trainer.process] {
            kill_process(process, Signal::TERM).expect("it runs");
        }
        let (code, log) = trainer.end();
        assert_eq!(code, Some(143), "{log}");
        let (code, log) = end(server);
        assert_eq!(code, Some(143), "{log}");
        trainer = begin_training()?;
    }
    let (code, log) = end(Process(worker(&serve, variables)?.spawn().expect("starts")));
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = trainer.end();
    assert_eq!(code, Some(0), "{log}");
    Some(fs::read(model).expect("the model was exported"))
}

/// A trainer whose log is read while it trains.
struct Trainer {
    process: Pid,
    reading: JoinHandle<(Option<i32>, String)>,
}

impl Trainer {
    fn watch(mut command: Command) -> Self {
        let process = Process(command.spawn().expect("starts"));
        Self { process: Pid::from_child(&process.0), reading: thread::spawn(|| end(process)) }
    }

    fn end(self) -> (Option<i32>, String) {
        self.reading.join().expect("it waits")
    }
}

/// Reads a log until a line has `words`, and returns that.
fn said(process: &mut Child, words: &str) -> String {
    let mut log = String::new();
    for line in BufReader::new(process.stderr.as_mut().expect("piped")).lines().map_while(Result::ok) {
        if line.contains(words) {
            return line;
        }
        log = log + &line + "\n";
    }
    panic!("it ended without saying {words:?}:\n{log}")
}

#[test]
fn a_job_with_its_state_in_a_bucket_alone_is_the_same_after_20_preemptions() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let Some(undisturbed) = train(&path, &[], 0, 0, &folder.path().join("model.safetensors")) else { return };
    let model = store.files("jobs/mnist/model.safetensors");
    let disturbed = train(&store.url("jobs/mnist"), &store.variables(), 4, PREEMPTIONS, &model);
    assert!(disturbed.expect("a worker") == undisturbed, "the models differ");
    let metrics = store.files("jobs/mnist/run-00001/metrics/trainer-0");
    assert!(fs::read_dir(metrics).expect("the series are there").count() > 1);
}

#[test]
fn a_server_that_cannot_reach_its_bucket_says_why() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let port = free_port();
    let serve =
        |url: &str| format!("serve --port {port} --master-port {port} --consistency sync --checkpoint-dir {url}");
    for (url, code, words) in
        [("ftp://bucket/x", 2, "give s3://BUCKET/FOLDER"), ("az://container/x", 2, "AZURE_STORAGE_ACCOUNT_NAME")]
    {
        let Some(mut command) = worker(&serve(url), &store.variables()) else { return };
        let (found, log) = end(Process(command.spawn().expect("starts")));
        assert_eq!(found, Some(code), "{log}");
        assert!(log.contains(words), "{log}");
    }
    let Some(mut command) = worker(&serve("s3://missing/x"), &store.variables()) else { return };
    let mut server = Process(command.spawn().expect("starts"));
    let line = said(&mut server.0, "missing");
    assert!(line.contains("create the bucket"), "{line}");
}
