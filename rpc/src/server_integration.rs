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
    let settings = Settings { incarnation: config.incarnation, ..settings };
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use psjobs_api::Training;
    use tokio::net::TcpListener;
    use tokio::runtime::Runtime;
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// Starts server 0 of this incarnation with remote objects, until `stop`. Returns its address.
    fn start(runtime: &Runtime, incarnation: u32, stop: &CancellationToken) -> String {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let environment = Environment::new("mnist", "job-1", vec![address.clone()], 1, Training::default());
        let mut config = ServerConfig { incarnation, shared_memory: false, ..ServerConfig::new(&environment) };
        let _guard = runtime.enter();
        drop(host(&mut config, Registry::default()));
        runtime.spawn(psjobs_ps::server::run(listener, config, stop.clone().cancelled_owned()));
        address
    }

    #[test]
    fn the_objects_of_a_replaced_server_are_refused_by_those_that_know_its_successor() {
        let runtime = Runtime::new().expect("a runtime");
        let stop = CancellationToken::new();
        let (old, new) = (start(&runtime, 1, &stop), start(&runtime, 2, &stop));
        let settings = Settings::new(trainer_name(0), "job-1");
        let trainer = Endpoint::start(settings, Registry::default(), runtime.handle().clone());
        let connect = |address: &str| trainer.connect(&server_name(0), address, Duration::from_secs(10)).map(drop);
        connect(&new).expect("it is up");
        let error = connect(&old).expect_err("it was replaced").to_string();
        assert!(error.contains("ps-0 was replaced: this is its incarnation 1, and 2 has connected before"), "{error}");
        trainer.shutdown();
        stop.cancel();
    }
}
