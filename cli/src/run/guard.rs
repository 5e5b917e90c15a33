//! Sees to it that no process of a job outlives `psjobs`, even if `psjobs` is killed with SIGKILL and
//! can do nothing any more. A second process, the guard, holds the reading end of a pipe whose writing
//! end only `psjobs` has. It receives each process group that is started or gone; when the pipe closes
//! without a farewell, it kills the groups that are left. A process that has left its group, or had just been started
//! when `psjobs` was killed, is found by an entry of its environment, which the guard receives before the start.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use psjobs_api::env::PSJOB_RESULT_FILE;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// The argument with which a program starts itself as the guard.
const COMMAND: &str = "guard-process-groups";
/// Time in which a process that was being started has the environment that it is found by.
const STARTING: Duration = Duration::from_millis(100);

/// How this program starts itself, where that is not its executable file alone.
static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says how this program starts itself: the first words of a command, which its arguments follow. An interpreter that
/// runs it needs this. The first call counts.
pub fn set_program(words: Vec<OsString>) {
    PROGRAM.get_or_init(|| words);
}

/// Returns whether a process with this first argument was started as the guard.
pub fn is_guard(argument: Option<&OsStr>) -> bool {
    argument.is_some_and(|argument| argument == COMMAND)
}

/// The guard as `psjobs` sees it. Dropping it ends the guard.
#[derive(Debug)]
pub struct Guard {
    pipe: Option<ChildStdin>,
    process: Child,
}

impl Guard {
    pub fn start() -> io::Result<Self> {
        let mut command = match PROGRAM.get().and_then(|words| words.split_first()) {
            Some((program, words)) => {
                let mut command = Command::new(program);
                command.args(words);
                command
            }
            None => Command::new(std::env::current_exe()?),
        };
        let mut process = command
            .arg(COMMAND)
            // Where psjobs itself runs in a job, this one must outlive it.
            .env_remove(PSJOB_RESULT_FILE)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals from the terminal are not for it.
            .process_group(0)
            .spawn()?;
        Ok(Self { pipe: process.stdin.take(), process })
    }

    /// A process is about to be started that must not outlive this one. `entry`, `NAME=VALUE`, is in its environment and
    /// in that of no other process but those that it starts.
    pub fn expect(&mut self, entry: &str) -> io::Result<()> {
        self.write(&format!("={entry}\n"))
    }

    /// A process group that must not outlive this process.
    pub fn watch(&mut self, group: Pid) -> io::Result<()> {
        self.notify('+', group)
    }

    /// A process group that is gone; its number may come again for somebody else.
    pub fn forget(&mut self, group: Pid) -> io::Result<()> {
        self.notify('-', group)
    }

    fn notify(&mut self, what: char, group: Pid) -> io::Result<()> {
        self.write(&format!("{what}{}\n", group.as_raw_nonzero()))
    }

    /// Writes one line at once, so that the guard never sees half of it.
    fn write(&mut self, line: &str) -> io::Result<()> {
        self.pipe.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(line.as_bytes())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        self.process.wait().ok();
    }
}

/// The guard's own life: until its standard input ends.
pub fn main() -> u8 {
    // Out of the way of `killall psjobs`, which would take the guard with what it guards.
    rustix::thread::set_name(c"job-guard").ok();
    let LeftOver { groups, entries, starting } = left_over(io::stdin().lock());
    if groups.is_empty() && !starting {
        return 0;
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        kill_process_group(group, Signal::KILL).ok();
    }
    let is_ours = |found: &[u8]| entries.iter().any(|entry| entry.as_bytes() == found);
    kill_those_with(is_ours);
    if starting {
        thread::sleep(STARTING);
        kill_those_with(is_ours);
    }
    0
}

/// Kills the processes that have such an entry in their environment, where the system shows it.
pub(super) fn kill_those_with(is_ours: impl Fn(&[u8]) -> bool) {
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let id = process.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let (Some(id), Ok(environment)) = (id, fs::read(process.path().join("environ"))) else { continue };
        if environment.split(|byte| *byte == 0).any(&is_ours) {
            kill_process(id, Signal::KILL).ok();
        }
    }
}

/// The rest of a job when `psjobs` is gone.
#[derive(Debug, Default, PartialEq)]
struct LeftOver {
    /// Groups that were started and did not go.
    groups: BTreeSet<i32>,
    /// Entries in the environments of all processes that were started.
    entries: BTreeSet<String>,
    /// A process was about to be started, and its group is not known.
    starting: bool,
}

/// Reads `+12`, `-12` and `=NAME=VALUE` lines to the end.
fn left_over(lines: impl BufRead) -> LeftOver {
    let mut left = LeftOver::default();
    for line in lines.lines().map_while(Result::ok) {
        if let Some(entry) = line.strip_prefix('=') {
            left.entries.insert(entry.to_owned());
            left.starting = true;
        }
        let Some(group) = line.get(1..).and_then(|number| number.parse().ok()) else { continue };
        if line.starts_with('+') {
            left.groups.insert(group);
            left.starting = false;
        } else {
            left.groups.remove(&group);
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_did_not_go_are_left_over() {
        let rows = [
            ("+10\n+11\n-10\n+12\nnonsense\n\n+13\n-13\n", &[11, 12][..], &[][..], false),
            ("=FILE=/a\n+10\n=FILE=/b\n", &[10], &["FILE=/a", "FILE=/b"][..], true),
            ("=FILE=/a\n+10\n-10\n", &[], &["FILE=/a"][..], false),
        ];
        for (lines, groups, entries, starting) in rows {
            let entries = entries.iter().map(ToString::to_string).collect();
            let want = LeftOver { groups: groups.iter().copied().collect(), entries, starting };
            assert_eq!(left_over(lines.as_bytes()), want, "{lines}");
        }
    }
}
