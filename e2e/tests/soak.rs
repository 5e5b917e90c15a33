//! `make soak`: runs jobs of every kind under a seeded schedule of faults, and ends with exit code 1 if any of them was
//! not as good as an undisturbed one. It needs a cluster of kind with two workers, and makes one where there is none.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use clap::Parser;
use psjobs_e2e::cluster::Cluster;
use psjobs_e2e::soak::run::run;
use psjobs_e2e::soak::verdict::Verdict;
use tokio::runtime;

/// Stack of the threads: without optimisation the futures need more than the usual 2 MiB.
const STACK: usize = 16 << 20;

/// Run jobs of every kind on a cluster while a schedule of faults disturbs them
#[derive(Debug, Parser)]
struct Arguments {
    /// Minutes in which jobs begin and faults happen; undisturbed jobs before it and the last ones take some more
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(3..=7 * 24 * 60))]
    minutes: u64,
    /// Seed of the schedule [default: another one each time]
    #[arg(long)]
    seed: Option<u64>,
    /// Folder that takes the logs of all pods, made anew
    #[arg(long, default_value = "target/soak")]
    logs: PathBuf,
    /// Print the result as JSON, too
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match soak(&arguments) {
        Ok(verdict) => {
            println!("\n{verdict}");
            if arguments.json {
                println!("{:#}", verdict.json());
            }
            if verdict.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn soak(arguments: &Arguments) -> Result<Verdict> {
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let seed = arguments.seed.unwrap_or_else(now);
    let length = Duration::from_secs(arguments.minutes * 60);
    let runtime = runtime::Builder::new_multi_thread().enable_all().thread_stack_size(STACK).build();
    runtime.context("cannot start a runtime")?.block_on(async {
        let cluster = Arc::new(Cluster::prepare(2, &[]).await?);
        if arguments.logs.exists() {
            std::fs::remove_dir_all(&arguments.logs).context("the logs of the soak before")?;
        }
        let verdict = run(cluster.clone(), seed, length, &arguments.logs).await?;
        if verdict.passed() {
            cluster.clean_up().await?;
        }
        Ok(verdict)
    })
}
