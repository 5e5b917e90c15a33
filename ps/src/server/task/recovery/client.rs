//! Connects to the `Recovery` service of another server.

use std::time::Duration;

use tonic::Status;
use tonic::transport::Channel;

use crate::network::Network;
use crate::proto::recovery_client::RecoveryClient;

/// Returns a client of the server at `address`, which connects at its first call.
pub(super) fn client(network: &Network, address: &str) -> Result<RecoveryClient<Channel>, Status> {
    let endpoint = (network.endpoint(address))
        .map_err(|_| Status::invalid_argument(format!("{address:?} is not the address of a server")))?;
    Ok(RecoveryClient::new(network.connect_lazy(&endpoint.connect_timeout(Duration::from_secs(5)))))
}
