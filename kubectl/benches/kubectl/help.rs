//! How long the program takes to say how it is used.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::program::PROGRAM;

const RUNS: usize = 51;

/// Measures the help, and a program that does nothing, in turn; in ms.
pub fn times() -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut help, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        help.push(time(PROGRAM, &["--help"])?);
        floor.push(time("true", &[])?);
    }
    Ok((help, floor))
}

fn time(program: &str, arguments: &[&str]) -> Result<f64> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let begin = Instant::now();
    let status = command.status().with_context(|| format!("{program} does not start"))?;
    let taken = begin.elapsed().as_secs_f64() * 1000.0;
    ensure!(status.success(), "{program} has failed: {status}");
    Ok(taken)
}
