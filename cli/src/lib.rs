//! The library of the user's command, which the programs that measure jobs share: [`run`] runs a job on this machine.

pub mod certificates;
mod manifest;
pub mod plugin;
pub mod run;
pub mod validate;

use std::fmt;
use std::process::ExitCode;

/// Something that the user gave cannot work; the text says what to write instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(String);

impl BadInput {
    const EXIT_CODE: u8 = 2;

    pub fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string())
    }
}

/// Runs `command` as the main function of a program: prints its error and returns its exit code. A process that was
/// started to guard a job's processes does that instead.
pub fn main(command: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    if run::guard::is_guard() {
        return run::guard::main();
    }
    command().unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(if error.is::<BadInput>() { BadInput::EXIT_CODE } else { 1 })
    })
}
