use std::process::ExitCode;

fn main() -> ExitCode {
    psjobs_worker::cli::main()
}
