//! The process of a server, as benchmarks start it.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use psjobs_api::Environment;
use psjobs_ps::network::Network;
use psjobs_ps::server::{self, ServerConfig, ServerError};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::names::Names;

/// One server of the job that the environment describes, as benchmarks start them
///
/// Prints its address when it listens. SIGTERM ends it after a last checkpoint, if it keeps any; their folder may be the URL of
/// one in an object store, for which the environment has the credentials.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Folder with a file for each server's name, which holds its address; the server then listens at a free port
    #[arg(long, value_name = "DIR")]
    names: Option<PathBuf>,
}

/// Time that a server which has ended gives to what it still writes.
const LEFT_OVERS: Duration = Duration::from_secs(2);

impl ServerArgs {
    pub fn serve(&self) -> anyhow::Result<()> {
        let environment = Environment::from_vars(|name| std::env::var(name).ok())?;
        let environment = environment.context("no job in the environment")?;
        let own = &environment.servers[environment.index as usize];
        let (address, network) = match &self.names {
            Some(folder) => ("127.0.0.1:0", Network::Other(Arc::new(Names::new(folder)))),
            None => (own.as_str(), Network::of(&environment)?),
        };
        let runtime = Runtime::new().context("cannot start a runtime")?;
        let ended: anyhow::Result<()> = runtime.block_on(async {
            // Heard from the moment at which the address is known.
            let mut terminate = signal(SignalKind::terminate()).context("cannot hear SIGTERM")?;
            let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen at {address}"))?;
            // Whoever started it need not want to know.
            writeln!(std::io::stdout(), "{}", listener.local_addr()?).ok();
            let mut config = ServerConfig { network, ..ServerConfig::new(&environment) };
            if let (Some(checkpoint), Some(kept)) = (&environment.checkpoint, &mut config.checkpoint) {
                kept.folder = psjobs_object_store::folder(&checkpoint.folder, variables())?;
            }
            let stopped = async move {
                terminate.recv().await;
            };
            match server::run(listener, config, stopped).await {
                Ok(_) | Err(ServerError::Stopped) => Ok(()),
                Err(error) => Err(error.into()),
            }
        });
        // As `psjobs-worker serve` does: work that no task waits for does not keep the process.
        runtime.shutdown_timeout(LEFT_OVERS);
        ended
    }
}

/// Returns the variables of this process that are text.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
