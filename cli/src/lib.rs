//! The library of the user's command, which the programs that measure jobs share: [`run`] runs a job on this machine, [`estimate`]
//! computes how fast one would be elsewhere.

mod bad_input;
pub mod certificates;
pub mod command_line;
pub mod estimate;
mod manifest;
pub mod plugin;
pub mod run;
pub mod setting;
pub mod validate;

use std::ffi::OsStr;
use std::process::ExitCode;

pub use bad_input::BadInput;

/// Runs `command` as the main function of a program: prints its error and returns its exit code. A process that was
/// started to guard a job's processes does that instead.
pub fn main(command: impl FnOnce() -> anyhow::Result<u8>) -> ExitCode {
    ExitCode::from(main_with(std::env::args_os().nth(1).as_deref(), command))
}

/// Does the same for a program with this first argument.
pub fn main_with(argument: Option<&OsStr>, command: impl FnOnce() -> anyhow::Result<u8>) -> u8 {
    if run::guard::is_guard(argument) {
        return run::guard::main();
    }
    command().unwrap_or_else(|error| {
        eprintln!("{error:#}");
        if error.is::<BadInput>() { BadInput::EXIT_CODE } else { 1 }
    })
}
