//! `psjobs compare`.

use std::process::ExitCode;

use clap::Parser;
use psjobs_bench::compare::CompareArgs;

#[derive(Debug, Parser)]
#[command(name = "psjobs-compare", bin_name = "psjobs compare", version)]
struct Cli {
    #[command(flatten)]
    args: CompareArgs,
}

fn main() -> ExitCode {
    psjobs::main(|| Cli::parse().args.run())
}
