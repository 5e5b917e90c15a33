//! Servers and trainers as processes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use psjobs_api::TrainingStatus;
use rustix::process::{Pid, Signal, kill_process};

/// Time for a process to say something.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Killed with this value.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It has usually ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the command of a worker with these arguments, `None` where there is none.
pub fn worker(arguments: &str, variables: &[(String, String)]) -> Option<Command> {
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

/// Waits until a process ends. Returns its exit code, and its log.
pub fn end(mut process: Process) -> (Option<i32>, String) {
    let mut log = String::new();
    if let Some(mut stream) = process.0.stderr.take() {
        stream.read_to_string(&mut log).expect("text");
    }
    (process.0.wait().expect("it ends").code(), log)
}

/// A trainer whose log is read while it trains.
pub struct Trainer {
    pub process: Pid,
    reading: Option<JoinHandle<(Option<i32>, String)>>,
}

impl Trainer {
    pub fn watch(mut command: Command) -> Self {
        let process = Process(command.spawn().expect("starts"));
        Self { process: Pid::from_child(&process.0), reading: Some(thread::spawn(|| end(process))) }
    }

    pub fn end(mut self) -> (Option<i32>, String) {
        self.reading.take().expect("it was not waited for yet").join().expect("it waits")
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // A test that fails waits for no trainer.
        if self.reading.as_ref().is_some_and(|reading| !reading.is_finished()) {
            let _ = kill_process(self.process, Signal::KILL);
        }
    }
}

/// Reads a log until a line has `words`, and returns that. The rest of the log is read, too, so that the process can go on.
pub fn said(process: &mut Child, words: &str) -> String {
    let log = BufReader::new(process.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || log.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    let (until, mut read) = (Instant::now() + DEADLINE, String::new());
    while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if line.contains(words) {
            return line;
        }
        read = read + &line + "\n";
    }
    panic!("it did not say {words:?} in {} s:\n{read}", DEADLINE.as_secs())
}

/// Asks a server for the status that the operator reads.
pub fn status(metrics_port: u16) -> TrainingStatus {
    let mut stream = TcpStream::connect(("127.0.0.1", metrics_port)).expect("it listens");
    write!(stream, "GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("asks");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    let body = answer.split("\r\n\r\n").nth(1).expect("a body");
    serde_json::from_str(body).expect("JSON")
}
