//! One process of a job: started in a process group of its own, so that it and whatever it starts can
//! be ended together.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::exit::Exit;
use super::guard;
use super::log::{self, Watcher};
use super::plan::{DATA_VARIABLE, Launch};

/// Begins the names of the variables that are psjobs' own.
const PREFIX: &str = "PSJOB_";

/// A process that runs, or has ended and was not waited for.
#[derive(Debug)]
pub struct Process {
    pub group: Pid,
    /// In its environment, and in that of what it has started.
    entry: String,
    child: Child,
    output: JoinHandle<Vec<String>>,
    /// Dropped when the process is gone.
    ended: oneshot::Sender<()>,
}

impl Process {
    /// Starts a process; its output goes to the end of `log`.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn start(launch: &Launch, log: &Path, watcher: Option<Watcher>) -> io::Result<Self> {
        // A result of an earlier incarnation is not this one's.
        match std::fs::remove_file(&launch.result_file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let (output, writer) = io::pipe()?;
        let mut command = Command::new(&launch.program);
        for (name, _) in env::vars_os().filter(|(name, _)| is_of_another_job(name)) {
            command.env_remove(name);
        }
        let child = command
            .args(&launch.args)
            .envs(&launch.env)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .spawn()?;
        // The command holds the pipe's writing end; the output must end when the process does.
        drop(command);
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let group = group.ok_or_else(|| io::Error::other("the process has no id"))?;
        let log = log.to_owned();
        let (ended, gone) = oneshot::channel();
        let output = tokio::spawn(async move { log::follow(output, &log, watcher, gone).await });
        Ok(Self { group, entry: launch.entry(), child, output, ended })
    }

    /// Waits for its end, ends what it left running, also in groups of their own, and returns how it ended and its
    /// last lines.
    pub async fn wait(mut self) -> (Exit, Vec<String>) {
        let status = self.child.wait().await;
        signal(self.group, Signal::KILL);
        guard::kill_those_with(|entry| entry == self.entry.as_bytes());
        drop(self.ended);
        let tail = self.output.await.unwrap_or_default();
        (status.map_or(Exit::NotStarted, exit), tail)
    }
}

/// Returns whether a variable of this program says something about another job: one in which this program runs, or one
/// that a user has started by hand.
fn is_of_another_job(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PREFIX.as_bytes()) && name != DATA_VARIABLE
}

/// Sends a signal to a group; one that is gone already is no error.
pub fn signal(group: Pid, signal: Signal) {
    kill_process_group(group, signal).ok();
}

fn exit(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::NotStarted,
    }
}
