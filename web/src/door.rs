//! The address at which the page is served.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;

use crate::token::Token;

/// Ports that are tried where the user names no address.
const PORTS: Range<u16> = 8090..8100;

/// A bound listener, and the token that its visitors need.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    token: Token,
    /// The address for a browser, with the token.
    pub address: String,
}

/// Why the page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    #[error("cannot listen on {0}: {1}; name another address of this machine, with port 0 for a free one")]
    Address(SocketAddr, #[source] io::Error),
    #[error("the ports {} to {} are in use; name an address, as 127.0.0.1:9000", PORTS.start, PORTS.end - 1)]
    Ports,
    #[error("cannot listen: {0}")]
    Listener(#[from] io::Error),
}

impl Door {
    /// Takes the address that the user names, else the first free port of this machine from 8090 on.
    ///
    /// # Errors
    /// If the address is in use or not this machine's.
    pub fn open(named: Option<SocketAddr>) -> Result<Self, DoorError> {
        let listener = match named {
            Some(address) => TcpListener::bind(address).map_err(|error| DoorError::Address(address, error))?,
            None => {
                let mut free = PORTS.filter_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
                free.next().ok_or(DoorError::Ports)?
            }
        };
        listener.set_nonblocking(true)?;
        let (at, token) = (listener.local_addr()?, Token::random());
        let address = format!("http://{}/?token={}", host(at), token.as_str());
        Ok(Self { listener, token, address })
    }

    /// Returns the listener of tokio, and the token. Needs a runtime.
    ///
    /// # Errors
    /// If there is no runtime with I/O.
    pub fn into_parts(self) -> io::Result<(tokio::net::TcpListener, Token)> {
        Ok((tokio::net::TcpListener::from_std(self.listener)?, self.token))
    }
}

/// The host and port that a browser opens: one that listens everywhere is opened on this machine.
fn host(at: SocketAddr) -> String {
    match at.ip().is_unspecified() {
        true => format!("localhost:{}", at.port()),
        false => at.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_can_open_the_address() {
        for (at, wanted) in [
            ("127.0.0.1:8090", "127.0.0.1:8090"),
            ("0.0.0.0:80", "localhost:80"),
            ("[::]:80", "localhost:80"),
            ("[::1]:80", "[::1]:80"),
            ("10.0.0.7:1", "10.0.0.7:1"),
        ] {
            assert_eq!(host(at.parse().expect("an address")), wanted);
        }
    }

    #[test]
    fn an_address_in_use_is_refused_with_its_name() {
        let first = Door::open(Some((Ipv4Addr::LOCALHOST, 0).into())).expect("a free port");
        let at = first.listener.local_addr().expect("it listens");
        let error = Door::open(Some(at)).expect_err("it is in use").to_string();
        assert!(error.starts_with(&format!("cannot listen on {at}: ")) && error.contains("name another"), "{error}");
    }
}
