//! Runs the programs that a user would type: docker, kind, helm, kubectl.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Deadline of a command; loading an image into a node takes longest.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a program and returns its standard output.
///
/// # Errors
/// If it does not start, fails or takes too long; the error holds the command and its output.
pub async fn run(program: &str, arguments: &[&str]) -> Result<String> {
    run_with_input(program, arguments, "").await
}

/// Runs a program with `input` as standard input.
///
/// # Errors
/// As [`run`].
pub async fn run_with_input(program: &str, arguments: &[&str], input: &str) -> Result<String> {
    let line = format!("{program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("`{line}` does not start; is {program} installed?"))?;
    let mut stdin = child.stdin.take().context("standard input is piped")?;
    let ended = async {
        // A program that fails early does not read its input; its own error matters more than the broken pipe.
        let _ = stdin.write_all(input.as_bytes()).await;
        drop(stdin);
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(LIMIT, ended)
        .await
        .with_context(|| format!("`{line}` has not ended after {} s", LIMIT.as_secs()))?
        .with_context(|| format!("cannot read what `{line}` says"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        bail!("`{line}` ended with {}:\n{}{}", output.status, said(&output.stderr), said(&output.stdout));
    }
    Ok(said(&output.stdout))
}
