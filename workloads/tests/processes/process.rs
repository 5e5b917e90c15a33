//! The binary as a child of a test.
use std::io::Read as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use psjobs_api::ReplicaResult;

/// A worker process that does not outlive its test.
pub struct Worker(pub Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // It has usually ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command `psjobs-worker ARGS...`, without what the test's own environment might pass to it.
pub fn command(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs-worker"));
    command.args(args.split_whitespace());
    for (name, _) in std::env::vars() {
        let ours = ["PSJOB_", "MASTER_", "LD_LIBRARY_PATH"].iter().any(|prefix| name.starts_with(prefix));
        if ours || ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RUST_LOG"].contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
    command.env("OMP_NUM_THREADS", "1");
    command
}

pub fn start(args: &str, result: &Path) -> Worker {
    let mut command = command(args);
    command.arg("--result-file").arg(result).stderr(Stdio::piped());
    Worker(command.spawn().expect("the binary starts"))
}

/// Waits for the end; the exit code and what was logged.
pub fn end(mut worker: Worker) -> (Option<i32>, String) {
    let mut log = String::new();
    worker.0.stderr.take().expect("piped").read_to_string(&mut log).expect("text");
    (worker.0.wait().expect("it ends").code(), log)
}

pub fn terminate(worker: &Worker) {
    let pid = rustix::process::Pid::from_child(&worker.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
}

/// Ends a process at once, and returns what it has logged.
pub fn kill(mut worker: Worker) -> String {
    worker.0.kill().expect("it is a child");
    end(worker).1
}

/// Waits until all have ended, reading what each logs meanwhile, so that none waits for a reader; returns the logs.
///
/// # Panics
/// If one did not end well, with what all have logged.
pub fn all_end_well(workers: impl IntoIterator<Item = Worker>) -> Vec<String> {
    let waiting: Vec<_> = workers.into_iter().map(|worker| std::thread::spawn(|| end(worker))).collect();
    let ended: Vec<_> = waiting.into_iter().map(|waits| waits.join().expect("it waits")).collect();
    let describe = |(code, log): &(Option<i32>, String)| format!("--- ended with {code:?}\n{log}");
    let all: String = ended.iter().map(describe).collect();
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{all}");
    ended.into_iter().map(|(_, log)| log).collect()
}

pub fn run(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command.output().expect("the binary starts");
    (status.code(), String::from_utf8(stderr).expect("text"))
}

/// Returns a port that no other test is given before the one that asked has taken it: tests run side by side. It is below
/// those that the kernel gives to connections.
pub fn free_port() -> u16 {
    const FIRST: u32 = 20_000;
    const COUNT: u32 = 10_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Test programs that run at the same time begin at different ports.
    let begin = std::process::id().wrapping_mul(97);
    loop {
        let number = begin.wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + number).expect("below 30,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub fn read(result: &Path) -> ReplicaResult {
    let text = std::fs::read_to_string(result).expect("a result file");
    ReplicaResult::parse(&text).expect("a result")
}
