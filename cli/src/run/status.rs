//! Asks server 0 how far the job is, again and again. A server that does not answer, because it has not
//! started or is none of ours, is simply asked again.

use std::time::Duration;

use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::proto::{StatusReply, StatusRequest};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::Endpoint;

const PERIOD: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = Duration::from_secs(2);

/// Polls `address` until the receiver is gone.
pub async fn poll(address: String, statuses: watch::Sender<Option<StatusReply>>) {
    let Ok(endpoint) = Endpoint::from_shared(format!("http://{address}")) else { return };
    let mut client = CoordinationClient::new(endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT).connect_lazy());
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !statuses.is_closed() {
        ticks.tick().await;
        if let Ok(reply) = client.status(StatusRequest {}).await {
            statuses.send_replace(Some(reply.into_inner()));
        }
    }
}
