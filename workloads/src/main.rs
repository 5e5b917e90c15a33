use std::process::ExitCode;

fn main() -> ExitCode {
    psjobs_workloads::cli::main()
}
