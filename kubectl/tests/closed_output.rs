//! The plugin where nobody reads what it prints.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

#[test]
fn a_reader_that_goes_away_is_no_error() {
    // Completion of commands needs no cluster.
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-psjob"));
    command.arg0("kubectl_complete-psjob").arg("").stdin(Stdio::null()).stderr(Stdio::piped());
    let output = command.stdout(File::create("/dev/full").expect("there")).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}
