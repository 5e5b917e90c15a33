//! The role of a peer, by the certificate that it shows: a connection carries it, and services that are for servers ask it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use psjobs_api::Role;
use psjobs_api::certificates::role_name;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;
use tonic::Status;
use tonic::transport::server::Connected;

/// The role in the certificate of a peer; `None` if the certificate names none. Requests of connections with TLS have it
/// in their extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerRole(pub Option<Role>);

impl PeerRole {
    /// Reads the role in a certificate that the authority has signed. One with the names of both roles is a server's.
    fn of(certificate: Option<&CertificateDer<'_>>) -> Self {
        let parsed = certificate.and_then(|certificate| ParsedCertificate::try_from(certificate).ok());
        let has_name = |role: &Role| {
            let name = ServerName::try_from(role_name(*role)).ok();
            parsed.as_ref().zip(name).is_some_and(|(parsed, name)| verify_server_name(parsed, &name).is_ok())
        };
        Self([Role::Server, Role::Trainer].into_iter().find(has_name))
    }

    /// Checks that a peer is a server of the job.
    ///
    /// # Errors
    /// PERMISSION_DENIED, with `what` it may not do, if the certificate is not a server's.
    pub fn check_is_server(peer: Option<Self>, what: &str) -> Result<(), Status> {
        let shown = match peer {
            Some(Self(Some(Role::Server))) => return Ok(()),
            Some(Self(Some(Role::Trainer))) => "the caller's is a trainer's",
            Some(Self(None)) => "the caller's names no role",
            None => "the caller has none",
        };
        let name = role_name(Role::Server);
        Err(Status::permission_denied(format!(
            "{what} needs the certificate of a server, which names {name}; {shown}. Give the folder ps of `psjobs \
             certificates` to servers and the folder trainer to trainers"
        )))
    }
}

/// A connection whose peer has shown a certificate of the job.
pub struct Admitted<S> {
    stream: TlsStream<S>,
    peer: PeerRole,
}

impl<S> Admitted<S> {
    /// Reads the role of the peer of `stream`, whose handshake is over.
    pub fn new(stream: TlsStream<S>) -> Self {
        let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let peer = PeerRole::of(shown.first());
        Self { stream, peer }
    }
}

impl<S> Connected for Admitted<S> {
    type ConnectInfo = PeerRole;

    fn connect_info(&self) -> PeerRole {
        self.peer
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Admitted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Admitted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
