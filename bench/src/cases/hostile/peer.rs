//! A peer that knows as much of HTTP/2 (RFC 9113) as it takes to begin gRPC calls and to see that they end. The clients of
//! this project cannot be made to announce a message that they do not send.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, bail};

/// A connection with calls that have begun.
#[derive(Debug)]
pub struct Peer {
    connection: TcpStream,
    /// Streams that the server has ended.
    ended: BTreeSet<u32>,
}

/// The first bytes of every client.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Types of frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// Flags of frames.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Bytes before the payload of a frame.
const FRAME_HEADER: usize = 9;
/// How long the server may be silent.
const ANSWER: Duration = Duration::from_secs(60);

impl Peer {
    /// Connects to a server and begins a call of `method` for each of `messages`, which are all that it sends in it.
    pub fn connect(address: &str, method: &str, messages: &[[u8; 5]]) -> anyhow::Result<Self> {
        let mut connection =
            TcpStream::connect(address).with_context(|| format!("cannot connect to the server at {address}"))?;
        connection.set_read_timeout(Some(ANSWER)).context("cannot limit the time of a connection")?;
        let mut sent = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        for (number, message) in (0..).zip(messages) {
            sent.extend(frame(HEADERS, END_HEADERS, stream(number), &headers(method)));
            sent.extend(frame(DATA, 0, stream(number), message));
        }
        match connection.write_all(&sent) {
            Err(error) if !is_closed(&error) => return Err(error).context("the server takes no calls"),
            _ => {}
        }
        Ok(Self { connection, ended: BTreeSet::new() })
    }

    /// Waits until the server ends another call; returns its stream. None if it has closed the connection, as it does with
    /// those of unknown callers beyond its limits.
    pub fn next_end(&mut self) -> anyhow::Result<Option<u32>> {
        loop {
            let mut header = [0; FRAME_HEADER];
            match self.connection.read_exact(&mut header) {
                Err(error) if is_closed(&error) => return Ok(None),
                read => read.context("the server does not end a call")?,
            }
            let [a, b, c, kind, flags, id @ ..] = header;
            let length = u32::from_be_bytes([0, a, b, c]);
            let mut payload = vec![0; length as usize];
            self.connection.read_exact(&mut payload).context("the server does not end a call")?;
            let id = u32::from_be_bytes(id);
            let ends = kind == RST_STREAM || (kind == HEADERS || kind == DATA) && flags & END_STREAM != 0;
            if ends && self.ended.insert(id) {
                return Ok(Some(id));
            }
            if kind == GOAWAY {
                bail!("the server closes the connection: {}", String::from_utf8_lossy(&payload));
            }
        }
    }
}

/// Returns whether an error is the end of a connection that the other side has closed.
fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// Returns the stream of call `number` of a connection: those of clients are odd.
pub fn stream(number: u32) -> u32 {
    2 * number + 1
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the headers of a call: by the static table of HPACK (RFC 7541), or as plain text.
fn headers(method: &str) -> Vec<u8> {
    // `:method: POST` and `:scheme: http`.
    let mut block = vec![0x83, 0x86];
    let rest = [(":path", method), (":authority", "server"), ("content-type", "application/grpc"), ("te", "trailers")];
    for (name, value) in rest {
        block.push(0);
        for text in [name, value] {
            // A length of less than 127 is one byte.
            block.push(text.len() as u8);
            block.extend(text.as_bytes());
        }
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_those_of_the_standard() {
        assert_eq!(frame(SETTINGS, 0, 0, &[]), [0, 0, 0, 4, 0, 0, 0, 0, 0]);
        assert_eq!(frame(DATA, 0, stream(1), &[7; 5]), [0, 0, 5, 0, 0, 0, 0, 0, 3, 7, 7, 7, 7, 7]);
        let block = headers("/a");
        assert_eq!(&block[..2], [0x83, 0x86]);
        assert_eq!(&block[2..12], b"\x00\x05:path\x02/a");
        assert!(block.ends_with(b"\x00\x02te\x08trailers"), "{block:?}");
    }
}
