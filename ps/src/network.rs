//! How the processes of a job reach each other: over TCP, with TLS or without, or through a [`Dial`] that the caller
//! provides, as the simulation of whole jobs does. All connections have the same time limits, which are here; windows are
//! the caller's.
//!
//! A machine that vanished is found by TCP: its kernel acknowledges nothing. A process that hangs while its kernel
//! lives is found by HTTP/2's keep-alive, which leaves it more time, because one that is merely slow must not be cut off.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream as Incoming;
use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use psjobs_api::{Environment, Role};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tonic::transport::server::{Connected, Router};
use tonic::transport::{Channel, Endpoint, Error, Server};
use tonic::{ConnectError, Status};
use tower::Service;

use crate::tls::{self, Credentials, TlsError};
use crate::unknown_peers;

/// How long a connection may be idle before it is probed.
const PROBE_AFTER: Duration = Duration::from_secs(3);
/// Time between probes without an answer.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Probes without an answer that end a connection: 9 s after the last answer.
const PROBES: u32 = 3;
/// How long sent data may be unacknowledged; longer ends the connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(9);
/// Limit for making a connection, unless the caller sets another one.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval of HTTP/2 pings, also while no call is open.
const PING_EVERY: Duration = Duration::from_secs(10);
/// How long a process may take to answer a ping.
const PING_ANSWER: Duration = Duration::from_secs(20);

/// Sets the options of an accepted connection: no delay of small packets, and the time limits of this module.
pub fn prepare(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    // A connection that has ended already takes none, and says so when it is read.
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY).with_retries(PROBES);
    let _ = socket.set_tcp_keepalive(&keepalive);
    let _ = socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
}

/// Sets the time limits of calls on all connections that a server accepts.
#[must_use]
pub fn limited(server: Server) -> Server {
    server.http2_keepalive_interval(Some(PING_EVERY)).http2_keepalive_timeout(Some(PING_ANSWER))
}

/// Returns what makes TCP connections with the time limits of this module.
fn connector(timeout: Option<Duration>) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(timeout);
    connector.set_keepalive(Some(PROBE_AFTER));
    connector.set_keepalive_interval(Some(PROBE_EVERY));
    connector.set_keepalive_retries(Some(PROBES));
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    connector
}

/// The bytes of one connection.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that is being made.
pub type Dialing = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

/// Makes connections.
pub trait Dial: Send + Sync {
    /// Connects to the server at `address`, which is `host:port`.
    fn dial(&self, address: &str) -> Dialing;
}

/// Why a service ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The gRPC service broke.
    #[error("the gRPC service ended")]
    Transport(#[source] Error),
    /// The certificates hold what no certificate holds.
    #[error("the certificates cannot be used; make the folder anew with `psjobs certificates DIR`")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The network that connections are made through.
#[derive(Clone, Default)]
pub enum Network {
    /// The system's TCP.
    #[default]
    Tcp,
    /// TCP, with mutual TLS.
    Tls(Arc<Credentials>),
    /// Something else.
    Other(Arc<dyn Dial>),
}

impl Network {
    /// Returns the network that `environment` asks for: with TLS if it names a folder with certificates.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn of(environment: &Environment) -> Result<Self, TlsError> {
        match &environment.tls_folder {
            Some(folder) => Ok(Self::Tls(Arc::new(Credentials::load(Path::new(folder))?))),
            None => Ok(Self::Tcp),
        }
    }

    /// Returns the credentials of this process, if the job uses TLS.
    #[must_use]
    pub fn credentials(&self) -> Option<&Credentials> {
        match self {
            Self::Tls(credentials) => Some(credentials),
            Self::Tcp | Self::Other(_) => None,
        }
    }

    /// How to connect to the process at `address`, which is `host:port`: with the time limits of this module. With TLS it
    /// must show a certificate of `role`; `None` takes any process of the job.
    ///
    /// # Errors
    /// If that is no address, or the certificates are damaged.
    pub fn endpoint(&self, address: &str, role: Option<Role>) -> Result<Endpoint, Error> {
        let endpoint = match self {
            Self::Tls(credentials) => {
                Endpoint::from_shared(format!("https://{address}"))?.tls_config(credentials.client(role))?
            }
            Self::Tcp | Self::Other(_) => Endpoint::from_shared(format!("http://{address}"))?,
        };
        Ok(endpoint
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_ANSWER)
            .keep_alive_while_idle(true))
    }

    /// Connects to `endpoint`.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        match self {
            Self::Tcp | Self::Tls(_) => {
                endpoint.connect_with_connector(connector(endpoint.get_connect_timeout())).await
            }
            Self::Other(dial) => endpoint.connect_with_connector(Connector(dial.clone())).await,
        }
    }

    /// Serves those of `incoming` that may come in, until `stop` resolves. `processes` of the job may connect at the same time;
    /// 0 where their number is not known.
    ///
    /// # Errors
    /// If the certificates are damaged, or the service breaks.
    pub async fn serve<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
        &self,
        router: Router,
        incoming: impl Incoming<Item = io::Result<S>>,
        processes: u32,
        stop: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let served = match self {
            Self::Tls(credentials) => {
                let incoming = credentials.admit(incoming).map_err(|error| ServeError::Tls(error.into()))?;
                Box::pin(router.serve_with_incoming_shutdown(incoming, stop)).await
            }
            Self::Tcp | Self::Other(_) => {
                let incoming = unknown_peers::admit(incoming, tls::address, processes);
                Box::pin(router.serve_with_incoming_shutdown(incoming, stop)).await
            }
        };
        served.map_err(ServeError::Transport)
    }

    /// Checks that a process listens at `address`, which is `host:port`.
    ///
    /// # Errors
    /// The error of the attempt.
    pub async fn probe(&self, address: &str) -> io::Result<()> {
        match self {
            Self::Tcp | Self::Tls(_) => TcpStream::connect(address).await.map(drop),
            Self::Other(dial) => dial.dial(address).await.map(drop),
        }
    }

    /// A channel that connects to `endpoint` at its first call.
    #[must_use]
    pub fn connect_lazy(&self, endpoint: &Endpoint) -> Channel {
        match self {
            Self::Tcp | Self::Tls(_) => endpoint.connect_with_connector_lazy(connector(endpoint.get_connect_timeout())),
            Self::Other(dial) => endpoint.connect_with_connector_lazy(Connector(dial.clone())),
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "Tcp",
            Self::Tls(_) => "Tls",
            Self::Other(_) => "Other",
        })
    }
}

/// A [`Dial`] as the transport wants it.
struct Connector(Arc<dyn Dial>);

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialing = self.0.dial(uri.authority().map_or("", |authority| authority.as_str()));
        Box::pin(async move { dialing.await.map(TokioIo::new) })
    }
}

/// Returns whether a request was never sent because there was no connection.
pub(crate) fn never_sent(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<ConnectError>())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn both_ends_of_a_connection_have_the_limits_of_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let uri: Uri = format!("http://{address}").parse().expect("a URI");
        let (made, accepted) = tokio::join!(connector(None).call(uri), listener.accept());
        let (made, (accepted, _)) = (made.expect("it connects").into_inner(), accepted.expect("it accepts"));
        prepare(&accepted);
        for (end, stream) in [("the caller's", &made), ("the server's", &accepted)] {
            let socket = SockRef::from(stream);
            assert!(socket.keepalive().expect(end) && socket.tcp_nodelay().expect(end), "{end}");
            assert_eq!(socket.tcp_keepalive_time().expect(end), PROBE_AFTER, "{end}");
            assert_eq!(socket.tcp_keepalive_interval().expect(end), PROBE_EVERY, "{end}");
            assert_eq!(socket.tcp_keepalive_retries().expect(end), PROBES, "{end}");
            assert_eq!(socket.tcp_user_timeout().expect(end), Some(UNACKNOWLEDGED), "{end}");
        }
    }
}
