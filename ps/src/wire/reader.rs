//! Takes messages out of a body, whatever pieces they come in.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::{Buf as _, Bytes};
use http_body::Body as _;
use prost::Message;
use tonic::Status;
use tonic::body::Body;

use super::frame::{self, LONGEST_HEAD, PREFIX};
use super::{Buffers, MAX_FIRST_MESSAGE, MAX_MESSAGE};
use crate::proto;
use crate::unknown_peers::Peer;

/// Reads the messages of one direction of a call.
#[derive(Debug)]
pub struct Reader {
    body: Body,
    /// Received, not read yet.
    piece: Bytes,
    buffers: Buffers,
    /// The caller; `None` on the side of the caller, and where certificates say who it is.
    peer: Option<Peer>,
}

impl Reader {
    /// Reads `body`; payloads lie in memory of `buffers`.
    #[must_use]
    pub fn new(body: Body, buffers: Buffers) -> Self {
        Self { body, piece: Bytes::new(), buffers, peer: None }
    }

    /// Reads the messages of a request that `peer` sends.
    #[must_use]
    pub fn of(mut self, peer: Option<Peer>) -> Self {
        self.peer = peer;
        self
    }

    /// Returns the caller, if it is one that may be unknown.
    #[must_use]
    pub fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Lifts the limits for connections of unknown peers: the first message names this job.
    pub fn set_known(&self) {
        if let Some(peer) = &self.peer {
            peer.set_known();
        }
    }

    /// The next message; `None` at a good end. A payload in it is a view of the received message.
    /// After an error, or if the future is dropped before it is ready, the stream cannot be read on.
    ///
    /// # Errors
    /// Returns the status that the other side ended with, or the fault of its message.
    pub async fn message<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        let Some(length) = self.length_of_block().await? else { return Ok(None) };
        decode(self.bytes(length).await?)
    }

    /// Begins to read a `ParameterBlock`, and returns it with the length of the payload that is still to be read, by
    /// [`Reader::pieces`] or [`Reader::bytes`]; `None` at a good end. A message that is written otherwise than servers do
    /// comes whole, with its payload in it, and the length 0.
    ///
    /// # Errors
    /// As [`Reader::message`].
    pub async fn block(&mut self) -> Result<Option<(proto::ParameterBlock, usize)>, Status> {
        let Some(length) = self.length_of_block().await? else { return Ok(None) };
        self.gather(length.min(LONGEST_HEAD)).await?;
        if let Some((head, at)) = frame::parameters_head(&self.piece, length) {
            self.piece.advance(at);
            return Ok(Some((head, length - at)));
        }
        let whole: Option<proto::ParameterBlock> = decode(self.bytes(length).await?)?;
        Ok(whole.map(|block| (block, 0)))
    }

    /// Reads `length` bytes and hands them to `take` in the pieces that they come in, without a copy.
    ///
    /// # Errors
    /// As [`Reader::message`].
    pub async fn pieces(&mut self, mut length: usize, mut take: impl FnMut(&[u8])) -> Result<(), Status> {
        while length > 0 {
            if self.piece.is_empty() {
                self.piece = self.next_piece().await?.ok_or_else(cut)?;
            }
            let n = self.piece.len().min(length);
            take(&self.piece[..n]);
            self.advance(n);
            length -= n;
        }
        Ok(())
    }

    /// Reads `length` bytes into one buffer.
    ///
    /// # Errors
    /// As [`Reader::message`].
    pub async fn bytes(&mut self, length: usize) -> Result<Bytes, Status> {
        let mut buffer = self.buffers.take(length);
        if !self.fill(buffer.bytes_mut()).await? && length > 0 {
            return Err(cut());
        }
        Ok(buffer.freeze())
    }

    /// As [`Reader::message`], for a message by which the peer becomes known: a short one, in memory of its own, because the
    /// buffers belong to known peers.
    ///
    /// # Errors
    /// As [`Reader::message`].
    pub async fn first_message<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        let Some(length) = self.length().await? else { return Ok(None) };
        if length > MAX_FIRST_MESSAGE {
            return Err(Status::invalid_argument(format!(
                "the first message has {length} bytes; it only says who the caller is, in {MAX_FIRST_MESSAGE} at most"
            )));
        }
        let mut bytes = vec![0; length];
        if !self.fill(&mut bytes).await? && length > 0 {
            return Err(cut());
        }
        decode(bytes.into())
    }

    /// The length of the next message; `None` at a good end.
    async fn length(&mut self) -> Result<Option<usize>, Status> {
        let mut prefix = [0; PREFIX];
        if !self.fill(&mut prefix).await? {
            return Ok(None);
        }
        let [compressed, length @ ..] = prefix;
        if compressed != 0 {
            return Err(Status::unimplemented("compressed messages are not read here; send them plain"));
        }
        Ok(Some(u32::from_be_bytes(length) as usize))
    }

    /// As [`Reader::length`], for a message with a block.
    async fn length_of_block(&mut self) -> Result<Option<usize>, Status> {
        let length = self.length().await?;
        if let Some(length) = length.filter(|length| *length > MAX_MESSAGE) {
            return Err(Status::invalid_argument(format!(
                "a message of {length} bytes is longer than {MAX_MESSAGE}; send one block a message"
            )));
        }
        Ok(length)
    }

    /// Makes the received piece at least `length` bytes long. It mostly is: servers begin a piece with a message.
    async fn gather(&mut self, length: usize) -> Result<(), Status> {
        while self.piece.len() < length {
            let next = self.next_piece().await?.ok_or_else(cut)?;
            self.piece = if self.piece.is_empty() { next } else { [&self.piece[..], &next[..]].concat().into() };
        }
        Ok(())
    }

    /// Fills `target`; false if the body ends before its first byte.
    async fn fill(&mut self, target: &mut [u8]) -> Result<bool, Status> {
        let mut done = 0;
        while done < target.len() {
            if self.piece.is_empty() {
                match self.next_piece().await? {
                    Some(piece) => self.piece = piece,
                    None if done == 0 => return Ok(false),
                    None => return Err(cut()),
                }
            }
            let n = self.piece.len().min(target.len() - done);
            target[done..done + n].copy_from_slice(&self.piece[..n]);
            self.advance(n);
            done += n;
        }
        Ok(true)
    }

    /// Goes on behind `n` bytes. A piece that has been read is let go of, because the connection receives the next one into
    /// the same memory if no view of it is left.
    fn advance(&mut self, n: usize) {
        self.piece.advance(n);
        if self.piece.is_empty() {
            self.piece = Bytes::new();
        }
    }

    /// The next bytes; the trailers' status, if it is an error.
    async fn next_piece(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await;
            let Some(frame) = frame.transpose()? else { return Ok(None) };
            match frame.into_data() {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => return Ok(Some(piece)),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    match Status::from_header_map(&trailers) {
                        Some(status) if status.code() != tonic::Code::Ok => return Err(status),
                        _ => return Ok(None),
                    }
                }
            }
        }
    }
}

fn decode<M: Message + Default>(bytes: Bytes) -> Result<Option<M>, Status> {
    M::decode(bytes).map(Some).map_err(|error| {
        Status::invalid_argument(format!("a message is no protobuf of this service: {error}; nothing was applied"))
    })
}

fn cut() -> Status {
    Status::invalid_argument("the stream ended within a message, which does not count")
}
