//! A connection between two ranks, with the job's certificates or without.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use psjobs_ps::tls::{Channel, Credentials};

use super::Place;

/// The identity that a rank shows its neighbours.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    pub place: Place,
    /// The job's uid.
    pub uid: &'a str,
    /// In a job whose processes talk TLS.
    pub credentials: Option<&'a Credentials>,
}

/// A connection to read and write, and the socket below for its options.
pub struct Stream {
    pub socket: TcpStream,
    channel: Box<dyn Channel>,
}

impl Identity<'_> {
    /// The connection to a rank that this one has called.
    pub fn call(&self, socket: TcpStream) -> io::Result<Stream> {
        self.speak(socket, Credentials::call)
    }

    /// The connection to a rank that has called this one.
    pub fn answer(&self, socket: TcpStream) -> io::Result<Stream> {
        self.speak(socket, Credentials::answer)
    }

    fn speak(
        &self,
        socket: TcpStream,
        with: impl FnOnce(&Credentials, TcpStream) -> io::Result<Box<dyn Channel>>,
    ) -> io::Result<Stream> {
        let below = socket.try_clone()?;
        let channel = match self.credentials {
            Some(credentials) => with(credentials, below)?,
            None => Box::new(below),
        };
        Ok(Stream { socket, channel })
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.channel.read(bytes)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.channel.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.channel.flush()
    }
}
