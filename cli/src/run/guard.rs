//! Sees to it that no process of a job outlives `psjobs`, even if `psjobs` is killed with SIGKILL and
//! can do nothing any more. A second process, the guard, holds the reading end of a pipe whose writing
//! end only `psjobs` has. It receives each process group that is started or gone; when the pipe closes
//! without a farewell, it kills the groups that are left.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

/// The argument with which a program starts itself as the guard.
const COMMAND: &str = "guard-process-groups";

/// Returns whether this process was started as the guard.
pub fn is_guard() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == COMMAND)
}

/// The guard as `psjobs` sees it. Dropping it ends the guard.
#[derive(Debug)]
pub struct Guard {
    pipe: Option<ChildStdin>,
    process: Child,
}

impl Guard {
    pub fn start() -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals from the terminal are not for it.
            .process_group(0)
            .spawn()?;
        Ok(Self { pipe: process.stdin.take(), process })
    }

    /// A process group that must not outlive this process.
    pub fn watch(&mut self, group: Pid) -> io::Result<()> {
        self.tell('+', group)
    }

    /// A process group that is gone; its number may come again for somebody else.
    pub fn forget(&mut self, group: Pid) -> io::Result<()> {
        self.tell('-', group)
    }

    fn tell(&mut self, what: char, group: Pid) -> io::Result<()> {
        let pipe = self.pipe.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        // One write for one line, so that the guard never sees half a number.
        pipe.write_all(format!("{what}{}\n", group.as_raw_nonzero()).as_bytes())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        self.process.wait().ok();
    }
}

/// The guard's own life: until its standard input ends.
pub fn main() -> ExitCode {
    // Out of the way of `killall psjobs`, which would take the guard with what it guards.
    rustix::thread::set_name(c"job-guard").ok();
    for group in left_over(io::stdin().lock()) {
        if let Some(group) = Pid::from_raw(group) {
            kill_process_group(group, Signal::KILL).ok();
        }
    }
    ExitCode::SUCCESS
}

/// The groups that were started and did not go, in `+12`, `-12` lines.
fn left_over(lines: impl BufRead) -> BTreeSet<i32> {
    let mut groups = BTreeSet::new();
    for line in lines.lines().map_while(Result::ok) {
        let Some(group) = line.get(1..).and_then(|number| number.parse().ok()) else { continue };
        if line.starts_with('+') {
            groups.insert(group);
        } else {
            groups.remove(&group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_did_not_go_are_left_over() {
        let lines = "+10\n+11\n-10\n+12\nnonsense\n\n+13\n-13\n";
        assert_eq!(left_over(lines.as_bytes()), BTreeSet::from([11, 12]));
    }
}
