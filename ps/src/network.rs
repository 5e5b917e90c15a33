//! How the processes of a job reach each other: over TCP, with TLS or without, or through a [`Dial`] that the caller
//! provides, as the simulation of whole jobs does. Deadlines, windows and keep-alive are the
//! endpoint's.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream as Incoming;
use http::Uri;
use hyper_util::rt::TokioIo;
use psjobs_api::Environment;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tonic::transport::server::{Connected, Router};
use tonic::transport::{Channel, Endpoint, Error};
use tower::Service;

use crate::tls::{Credentials, TlsError};

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

    /// How to connect to the server at `address`, which is `host:port`.
    ///
    /// # Errors
    /// If that is no address, or the certificates are damaged.
    pub fn endpoint(&self, address: &str) -> Result<Endpoint, Error> {
        match self {
            Self::Tls(credentials) => {
                Endpoint::from_shared(format!("https://{address}"))?.tls_config(credentials.client())
            }
            Self::Tcp | Self::Other(_) => Endpoint::from_shared(format!("http://{address}")),
        }
    }

    /// Connects to `endpoint`.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        match self {
            Self::Tcp | Self::Tls(_) => endpoint.connect().await,
            Self::Other(dial) => endpoint.connect_with_connector(Connector(dial.clone())).await,
        }
    }

    /// Serves those of `incoming` that may come in, until `stop` resolves.
    ///
    /// # Errors
    /// If the certificates are damaged, or the service breaks.
    pub async fn serve<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
        &self,
        router: Router,
        incoming: impl Incoming<Item = io::Result<S>>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let served = match self {
            Self::Tls(credentials) => {
                let incoming = credentials.admit(incoming).map_err(|error| ServeError::Tls(error.into()))?;
                Box::pin(router.serve_with_incoming_shutdown(incoming, stop)).await
            }
            Self::Tcp | Self::Other(_) => router.serve_with_incoming_shutdown(incoming, stop).await,
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
            Self::Tcp | Self::Tls(_) => endpoint.connect_lazy(),
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
