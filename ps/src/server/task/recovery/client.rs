//! Calls the `Recovery` service of another server, until it answers.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use psjobs_api::Role;
use tonic::Status;
use tonic::transport::Channel;

use crate::network::Network;
use crate::proto::recovery_client::RecoveryClient;
use crate::retry::{Failure, Schedule, retry};

/// Pause between two attempts to reach a server.
pub(super) const PAUSE: Duration = Duration::from_millis(200);
/// Interval at which the log names a server that does not answer.
const QUIET: Duration = Duration::from_secs(10);

/// Returns a client of the server at `address`, which connects at its first call. An answer may take any time, because
/// reading a checkpoint does; the time limits of the network find a server that is gone meanwhile.
pub(in crate::server::task) fn client(network: &Network, address: &str) -> Result<RecoveryClient<Channel>, Status> {
    let endpoint = (network.endpoint(address, Some(Role::Server)))
        .map_err(|_| Status::invalid_argument(format!("{address:?} is not the address of a server")))?;
    Ok(RecoveryClient::new(network.connect_lazy(&endpoint)))
}

/// Repeats `attempt` until it succeeds.
pub(super) async fn retry_until_ok<T, F: Future<Output = Result<T, Status>>>(who: &str, attempt: impl Fn() -> F) -> T {
    let mut logged = Duration::ZERO;
    loop {
        let attempt = || {
            let tried = attempt();
            async move { tried.await.map_err(Failure::<Infallible, Status>::Transient) }
        };
        let log = |status: &Status, elapsed| {
            if elapsed >= logged + QUIET {
                tracing::info!(reason = status.message(), "waiting for {who}");
                logged = elapsed;
            }
        };
        // Without a limit it ends only by success.
        if let Ok(answer) = retry(Schedule::every(PAUSE), pending(), attempt, log).await {
            return answer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::never_sent;
    use crate::proto;

    #[tokio::test]
    async fn a_request_to_no_process_was_never_sent() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a port");
        let mut client = client(&Network::default(), &closed.to_string()).expect("an address");
        let status = client.restore(proto::RestoreRequest::default()).await.expect_err("no process listens");
        assert!(never_sent(&status), "{status:?}");
        assert!(!never_sent(&Status::unavailable("the connection broke")));
    }
}
