//! The plugin that kubectl calls for `kubectl psjob` and, by the name `kubectl_complete-psjob`, for completion in the shell.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;
use kubectl_psjob::command_line::Cli;
use kubectl_psjob::completion;

fn main() -> ExitCode {
    let mut words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let program = words.next().unwrap_or_default();
    if Path::new(&program).file_name().is_some_and(|name| name == "kubectl_complete-psjob") {
        completion::print(&words.collect::<Vec<_>>());
        return ExitCode::SUCCESS;
    }
    psjobs::main(|| Cli::parse().run())
}
