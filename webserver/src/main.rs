//! The binary `psjobs-web`: flags, logs, signals.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use psjobs_web_server::settings::{LogFormat, Settings};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Threads of the runtime: one that watches, and one that serves meanwhile.
const THREADS: usize = 2;

fn main() -> ExitCode {
    let settings = Settings::parse();
    let runtime = match begin(&settings) {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(2);
        }
    };
    match runtime.block_on(run(settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the runtime and logs.
fn begin(settings: &Settings) -> anyhow::Result<Runtime> {
    let filter = EnvFilter::try_new(&settings.log)
        .with_context(|| format!("--log {:?} is not a level or a list of filters", settings.log))?;
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = logs.with_ansi(std::io::stderr().is_terminal());
    let logs = match settings.log_format {
        LogFormat::Text => logs.with_filter(filter).boxed(),
        LogFormat::Json => logs.json().flatten_event(true).with_filter(filter).boxed(),
    };
    tracing_subscriber::registry().with(logs).init();
    Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().context("cannot start the runtime")
}

async fn run(settings: Settings) -> anyhow::Result<()> {
    let config = kube::Config::infer().await.context(
        "there is no cluster to show: run psjobs-web in a pod with a service account, or point KUBECONFIG at a cluster",
    )?;
    let listener = TcpListener::bind(settings.addr)
        .await
        .with_context(|| format!("cannot listen on {}; --addr names another address", settings.addr))?;
    info!(version = env!("CARGO_PKG_VERSION"), cluster = %config.cluster_url, address = %settings.addr, "psjobs-web starts");
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let stopper = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("psjobs-web ends");
        stopper.cancel();
    });
    psjobs_web_server::run(settings, config, listener, stop).await
}
