//! The operator's binary: flags, logs, traces, signals.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use psjobs_operator::operate::operate;
use psjobs_operator::settings::{LogFormat, Settings};
use psjobs_operator::traces::{self, Traces};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Threads of the runtime. Two are enough for an operator that mostly waits, and each costs memory.
const THREADS: usize = 2;

fn main() -> ExitCode {
    let settings = Settings::parse();
    let (runtime, traces) = match begin(&settings) {
        Ok(begun) => begun,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(2);
        }
    };
    let result = runtime.block_on(async {
        let result = run(settings).await;
        if let Some(traces) = traces {
            traces.flush().await;
        }
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the runtime, logs and traces.
fn begin(settings: &Settings) -> anyhow::Result<(Runtime, Option<Traces>)> {
    let filter = EnvFilter::try_new(&settings.log)
        .with_context(|| format!("--log {:?} is not a level or a list of filters", settings.log))?;
    let filter = filter.add_directive(format!("{}=off", traces::TARGET).parse().expect("a directive"));
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = logs.with_ansi(std::io::stderr().is_terminal());
    let logs = match settings.log_format {
        LogFormat::Text => logs.with_filter(filter).boxed(),
        LogFormat::Json => logs.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let traces = runtime.block_on(async { Traces::from_env() });
    let spans = traces.as_ref().ok().and_then(Option::as_ref).map(|traces| traces.layer().boxed());
    tracing_subscriber::registry().with(logs).with(spans).init();
    // The operator works without traces.
    let traces = traces.unwrap_or_else(|error| {
        warn!("no traces are sent: {}", psjobs_operator::chain(&error));
        None
    });
    Ok((runtime, traces))
}

async fn run(settings: Settings) -> anyhow::Result<()> {
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
}
