//! TLS for connections of blocking calls, such as those between trainers that send each other long rows of numbers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use psjobs_api::certificates::NAME;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConnection, StreamOwned};

use super::{Credentials, DamagedError};

/// A blocking stream, with or without TLS.
pub trait Channel: Read + Write + Send {}

impl<C: Read + Write + Send> Channel for C {}

impl Credentials {
    /// Speaks on `socket` with a process that this one has called. They shake hands with the first bytes.
    ///
    /// # Errors
    /// If the certificates are damaged.
    pub fn call(&self, socket: TcpStream) -> io::Result<Box<dyn Channel>> {
        let config = self.caller().map_err(io::Error::other)?;
        let name = ServerName::try_from(NAME).expect("it is a name");
        let connection = ClientConnection::new(config.into(), name).map_err(io::Error::other)?;
        Ok(Box::new(StreamOwned::new(connection, socket)))
    }

    /// Speaks on `socket` with a process that has called this one. They shake hands with the first bytes.
    ///
    /// # Errors
    /// If the certificates are damaged.
    pub fn answer(&self, socket: TcpStream) -> io::Result<Box<dyn Channel>> {
        let mut config = self.server().map_err(io::Error::other)?;
        // A caller that only writes never reads them, and closing what is not read to its end drops what was sent.
        config.send_tls13_tickets = 0;
        let connection = ServerConnection::new(Arc::new(config)).map_err(io::Error::other)?;
        Ok(Box::new(StreamOwned::new(connection, socket)))
    }

    fn caller(&self) -> Result<ClientConfig, DamagedError> {
        let (provider, roots) = (Self::provider(), self.roots()?);
        let (shown, key) = self.shown()?;
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        Ok(builder.with_root_certificates(roots).with_client_auth_cert(shown, key)?)
    }
}
