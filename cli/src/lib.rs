//! The library of the user's command, which the programs that measure jobs share: [`run`] runs a job on this machine.

mod bad_input;
pub mod certificates;
mod manifest;
pub mod plugin;
pub mod run;
pub mod validate;

use std::process::ExitCode;

pub use bad_input::BadInput;

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
