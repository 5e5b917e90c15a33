//! Lets only servers of the job call a service, where processes show certificates. Without TLS there is nothing by which a
//! server could be distinguished from a trainer.

use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::network::Network;
use crate::peer_role::PeerRole;

/// Refuses callers without the certificate of a server.
#[derive(Clone, Debug)]
pub struct ServersOnly {
    /// Names the calls, for the refusal.
    what: &'static str,
    /// Callers show certificates.
    has_tls: bool,
}

impl ServersOnly {
    /// Guards the calls of `what` on `network`.
    #[must_use]
    pub fn new(what: &'static str, network: &Network) -> Self {
        Self { what, has_tls: network.credentials().is_some() }
    }
}

impl Interceptor for ServersOnly {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        if self.has_tls {
            let peer = request.extensions().get::<PeerRole>().copied();
            PeerRole::check_is_server(peer, self.what).inspect_err(|_| {
                tracing::warn!(?peer, "refused {} from a process that is no server of this job", self.what);
            })?;
        }
        Ok(request)
    }
}
