//! Commands that are programs of their own, beside `psjobs` or on PATH, so that who only runs jobs need not have them.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;
use clap::Args;

use crate::bad_input::BadInput;
use crate::run::machine;

/// The arguments of such a program, which it reads itself.
#[derive(Debug, Args)]
pub struct PluginArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Replaces this process by `program`.
///
/// # Errors
/// If the program is not found or cannot be started.
pub fn call(program: &str, PluginArgs { args }: &PluginArgs) -> anyhow::Result<u8> {
    let path = machine::find(program).ok_or_else(|| {
        BadInput::new(format!(
            "this command is the program {program}, which is neither beside psjobs nor on PATH; build it with `make \
             build`, or put it there"
        ))
    })?;
    let error = Command::new(&path).args(args).exec();
    Err(error).with_context(|| format!("cannot start {}", path.display()))
}
