//! Serves remote objects on a parameter server's own port, beside its services.

use psjobs_api::Environment;
use psjobs_ps::server::ServerConfig;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::service::Routes;

use crate::connection::Settings;
use crate::objects::{Endpoint, Registry};

/// Offers what `registry` can make on the server that `config` describes, under the name `ps-INDEX`, until
/// the server begins to end. The task that comes back ends when all connections are closed.
pub fn host(config: &mut ServerConfig, registry: Registry) -> JoinHandle<()> {
    let settings = Settings::new(server_name(config.index), config.job_uid.as_str());
    let endpoint = Endpoint::start(settings, registry, Handle::current());
    config.services = Routes::new(endpoint.service());
    let ending = config.ending.clone();
    tokio::spawn(async move {
        ending.cancelled().await;
        // A shutdown blocks, so it needs a thread where that is allowed.
        drop(tokio::task::spawn_blocking(move || endpoint.shutdown()).await);
    })
}

/// Returns a server's name in calls.
#[must_use]
pub fn server_name(index: u32) -> String {
    format!("ps-{index}")
}

/// Returns a trainer's name in calls.
#[must_use]
pub fn trainer_name(index: u32) -> String {
    format!("trainer-{index}")
}

/// Returns the name of the process in `environment`.
#[must_use]
pub fn name(environment: &Environment) -> String {
    format!("{}-{}", environment.role, environment.index)
}
