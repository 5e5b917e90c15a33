//! The operator's binary: flags, logs, signals.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use psjobs_operator::operate::operate;
use psjobs_operator::settings::{LogFormat, Settings};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

/// Two are enough for an operator that mostly waits, and each costs memory.
const THREADS: usize = 2;

fn main() -> ExitCode {
    let settings = Settings::parse();
    if let Err(error) = log(&settings) {
        eprintln!("error: {error:#}");
        return ExitCode::from(2);
    }
    match run(settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn log(settings: &Settings) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&settings.log)
        .with_context(|| format!("--log {:?} is not a level or a list of filters", settings.log))?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let logs = logs.with_ansi(std::io::stderr().is_terminal());
    match settings.log_format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().flatten_event(true).init(),
    }
    Ok(())
}

fn run(settings: Settings) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(async {
        let config = kube::Config::infer().await.context(
            "there is no cluster to work for: run the operator in a pod with a service account, or point KUBECONFIG at a cluster",
        )?;
        info!(version = env!("CARGO_PKG_VERSION"), cluster = %config.cluster_url, "the operator starts");
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        let stopper = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            info!("the operator ends");
            stopper.cancel();
        });
        operate(settings, config, stop).await
    })
}
