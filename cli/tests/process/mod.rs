//! A child process that neither outlives its test nor keeps it for ever, and the manifests that it is given.
// Each test target uses its part of this.
#![allow(dead_code)]

pub mod job;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A manifest of examples/ with some of its text replaced.
pub fn example(name: &str, changes: &[(&str, &str)]) -> String {
    let text = fs::read_to_string(root().join("examples").join(name)).expect("an example");
    changes.iter().fold(text, |text, (from, to)| {
        assert_eq!(text.matches(from).count(), 1, "{from:?} in examples/{name}");
        text.replace(from, to)
    })
}

/// Killed when it is dropped.
pub struct Running(Option<Child>);

impl Running {
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().expect("the program starts")))
    }

    pub fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it is taken by `output` only")
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(self.0.as_ref().expect("it is taken by `output` only"))
    }

    /// Returns all output until its end. A child that takes longer than the deadline is killed, and its exit
    /// code shows that.
    pub fn output(mut self, deadline: Duration) -> Output {
        let pid = self.pid();
        let (ended, end) = mpsc::channel::<()>();
        thread::spawn(move || {
            if end.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{pid:?} took longer than {deadline:?} and was killed");
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        let output = self.0.take().expect("it is taken here only").wait_with_output();
        drop(ended);
        output.expect("its output can be read")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It has usually ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
