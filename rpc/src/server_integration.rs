//! Remote objects beside a parameter server's own services: one port, one end.

use psjobs_api::Environment;
use psjobs_ps::server::ServerConfig;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::service::Routes;

use super::{Endpoint, Registry, Settings};

/// Offers what `registry` can make on the server that `config` is of, under the name `ps-INDEX`, until
/// the server begins to end. The task that comes back ends when all connections are closed.
pub fn host(config: &mut ServerConfig, registry: Registry) -> JoinHandle<()> {
    let settings = Settings::new(server_name(config.index), config.job_uid.as_str());
    let endpoint = Endpoint::start(settings, registry, Handle::current());
    config.services = Routes::new(endpoint.service());
    let ending = config.ending.clone();
    tokio::spawn(async move {
        ending.cancelled().await;
        // Blocks, so it needs a thread where that is allowed.
        drop(tokio::task::spawn_blocking(move || endpoint.shutdown()).await);
    })
}

/// A server's name in calls.
#[must_use]
pub fn server_name(index: u32) -> String {
    format!("ps-{index}")
}

/// A trainer's name in calls.
#[must_use]
pub fn trainer_name(index: u32) -> String {
    format!("trainer-{index}")
}

/// The name of the process in `environment`.
#[must_use]
pub fn name(environment: &Environment) -> String {
    format!("{}-{}", environment.role, environment.index)
}
