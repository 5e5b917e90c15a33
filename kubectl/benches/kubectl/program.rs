//! `kubectl-psjob` as a process of its own, and what it prints.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::DEADLINE;
use crate::server::Server;
use crate::speech::{LINES, number_of};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_kubectl-psjob");
/// Lines before the last when memory is read: more than pipe and buffers hold, so that the process is still there.
const LAST: usize = 10_000;

/// Killed with this value.
pub struct Program(Child);

/// The lines that the program printed, each once.
pub struct Printed {
    /// When each line was read, by its number.
    pub arrivals: Vec<Instant>,
    /// Lines behind one of a later time.
    pub late: usize,
    /// When the output ended.
    pub end: Instant,
    /// Most resident memory, in MiB.
    pub peak_mib: f64,
}

impl Program {
    /// Starts the program against a server.
    pub fn start(server: &Server, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).env("KUBECONFIG", server.kubeconfig()).stdin(Stdio::null()).stdout(Stdio::piped());
        // The server is on this machine.
        command.env_remove("HTTPS_PROXY").env_remove("https_proxy");
        Ok(Self(command.spawn().with_context(|| format!("{PROGRAM} does not start"))?))
    }

    /// Reads what it prints until it ends.
    ///
    /// # Errors
    /// If a line is missing, comes twice or was said by no pod, or the program fails or does not end in time.
    pub fn printed(mut self) -> Result<Printed> {
        let output = self.0.stdout.take().context("its output is a pipe")?;
        let process = self.0.id();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(read(output, process)));
        let printed = receiver.recv_timeout(DEADLINE).context("the program did not print all lines in time")??;
        let status = self.0.wait()?;
        ensure!(status.success(), "the program has failed: {status}");
        Ok(printed)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn read(output: impl Read, process: u32) -> Result<Printed> {
    let mut output = BufReader::with_capacity(1 << 16, output);
    let mut arrivals: Vec<Option<Instant>> = vec![None; LINES];
    let (mut seen, mut newest, mut late, mut peak_mib) = (0, 0, 0, 0.0);
    let mut line = Vec::new();
    loop {
        line.clear();
        if output.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&line);
        let number = number_of(&text).with_context(|| format!("no pod said the line {text:?}"))?;
        ensure!(arrivals[number].replace(Instant::now()).is_none(), "line {number} was printed twice");
        late += usize::from(number < newest);
        newest = newest.max(number);
        seen += 1;
        if seen == LINES - LAST {
            peak_mib = memory_mib(process)?;
        }
    }
    let end = Instant::now();
    let arrivals: Vec<Instant> = arrivals.into_iter().flatten().collect();
    ensure!(arrivals.len() == LINES, "the program printed {} lines of {LINES}", arrivals.len());
    Ok(Printed { arrivals, late, end, peak_mib })
}

/// Most resident memory of a process so far, in MiB.
fn memory_mib(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}; has the process ended?"))?;
    let value = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let value = value.with_context(|| format!("{path} has no VmHWM"))?;
    let kib: f64 = value.trim().trim_end_matches(" kB").parse().context("VmHWM is a number")?;
    Ok(kib / 1024.0)
}
