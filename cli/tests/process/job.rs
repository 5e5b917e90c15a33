//! A run whose containers are shell scripts, and waiting for what these do.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process};
use tempfile::TempDir;

use super::Running;

const DEADLINE: Duration = Duration::from_secs(30);

/// A server that lives until it is asked to end, and a trainer that does what the test says.
pub struct Job {
    pub folder: TempDir,
}

/// The output of a run.
pub struct Report {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Job {
    /// Both scripts find the folder of the test in `$DIR`.
    pub fn new(server: &str, trainer: &str, spec: &str) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let container = |name: &str, script: &str| {
            // In a manifest $$ stands for one $.
            let script = serde_json::to_string(&script.replace("$$", "$$$$")).expect("text");
            let dir = folder.path().display();
            format!(
                "template: {{spec: {{terminationGracePeriodSeconds: 2, containers: [{{name: {name}, \
                 command: [sh, -c, {script}], env: [{{name: DIR, value: '{dir}'}}]}}]}}}}"
            )
        };
        let text = format!(
            "apiVersion: psjobs.dev/v1alpha1\nkind: ParameterServerJob\nmetadata: {{name: job}}\nspec:\n  {spec}\n  \
             ps: {{{}}}\n  trainer: {{replicas: 2, {}}}\n",
            container("server", server),
            container("trainer", trainer)
        );
        fs::write(folder.path().join("job.yaml"), text).expect("written");
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs"));
        command.arg("run").arg(self.path("job.yaml")).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("TMPDIR", self.folder.path());
        command
    }

    pub fn run(&self, args: &[&str]) -> Report {
        Report::of(Running::start(&mut self.command(args)))
    }

    /// The process id that a script wrote with `echo $$ > $DIR/name`.
    pub fn pid(&self, name: &str) -> Pid {
        let number = || fs::read_to_string(self.path(name)).ok()?.trim().parse().ok();
        Pid::from_raw(wait_for(name, number)).expect("a process id")
    }
}

impl Report {
    pub fn of(child: Running) -> Self {
        let output = child.output(DEADLINE);
        Self {
            code: output.status.code().or(output.status.signal()),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Asks until there is an answer. The period is how often, not how long it takes.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(began.elapsed() < DEADLINE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A process whose parent does not wait for it stays as a zombie, which runs no more.
fn is_gone(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
    test_kill_process(pid).is_err() || state == Some(Some('Z'))
}

pub fn wait_until_gone(pid: Pid, who: &str) {
    wait_for(&format!("the end of {who}"), || is_gone(pid).then_some(()));
}
