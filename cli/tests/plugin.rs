//! Commands that are programs of their own.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Held by the test that runs. A process that another thread starts has a program's file open for writing until it is
/// another program, and that long the system runs no program of that file.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a copy of psjobs in `folder`, with nothing on PATH.
fn psjobs(folder: &Path, args: &[&str]) -> Output {
    let program = folder.join("psjobs");
    if !program.exists() {
        fs::copy(env!("CARGO_BIN_EXE_psjobs"), &program).expect("a copy");
    }
    Command::new(program).args(args).env("PATH", "").output().expect("the program starts")
}

#[test]
fn a_missing_program_is_named_with_what_to_do() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let output = psjobs(folder.path(), &["bench", "mnist"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("psjobs-bench") && said.contains("make build"), "{said}");
}

#[test]
fn a_program_gets_all_arguments_and_its_exit_code_counts() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("psjobs-compare");
    fs::write(&program, "#!/bin/sh\necho \"$@\"\nexit 7\n").expect("a script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("may be executed");
    for args in [&["codecs", "--seeds", "5", "-o", "page.html"][..], &["--help"], &[]] {
        let output = psjobs(folder.path(), &[&["compare"], args].concat());
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), args.join(" "), "{output:?}");
        assert_eq!(output.status.code(), Some(7), "{output:?}");
    }
}
