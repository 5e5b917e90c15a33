//! `psjobs bench`.

use std::process::ExitCode;

use clap::Parser;
use psjobs_bench::cases::BenchArgs;

#[derive(Debug, Parser)]
#[command(name = "psjobs-bench", bin_name = "psjobs bench", version)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

fn main() -> ExitCode {
    psjobs::main(|| Cli::parse().args.run())
}
