//! The process of a server, as benchmarks start it.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use psjobs_api::Environment;
use psjobs_ps::network::Network;
use psjobs_ps::server::{self, ServerConfig};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::names::Names;

/// One server of the job that the environment describes, as benchmarks start them
///
/// Prints its address when it listens.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Folder with a file for each server's name, which holds its address; the server then listens at a free port
    #[arg(long, value_name = "DIR")]
    names: Option<PathBuf>,
}

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
        runtime.block_on(async {
            let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen at {address}"))?;
            // Whoever started it need not want to know.
            writeln!(std::io::stdout(), "{}", listener.local_addr()?).ok();
            let config = ServerConfig { network, ..ServerConfig::new(&environment) };
            server::run(listener, config, std::future::pending()).await?;
            Ok(())
        })
    }
}
