//! One training stream, over a connection of its own.

use std::thread::available_parallelism;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;

use crate::proto::{self, exchange_request::Message};
use crate::wire::{Buffers, Outgoing, call, frame};

const EXCHANGE: &str = "/psjobs.v1.ParameterServer/Exchange";
/// More connections than this are not opened unless somebody asks for them.
const MOST: u32 = 4;

/// Connections to each server, if the job asks for so many or says nothing: with TLS one core for a connection is the
/// limit, and half of this process's cores are for other things.
#[must_use]
pub fn connections(asked: Option<u32>, tls: bool, cores: usize) -> u32 {
    let automatic = if tls { (cores / 2).clamp(1, MOST as usize) as u32 } else { 1 };
    asked.unwrap_or(automatic).max(1)
}

/// Threads that serve so many connections to a server: one connection is never faster on two.
pub fn threads(connections: u32) -> usize {
    (connections as usize).clamp(1, cores())
}

/// Cores of this process.
pub fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Which stream it is.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    pub server: u32,
    /// Its number among those to the server.
    pub lane: u32,
    /// Distinguishes it from those that had its place before.
    pub generation: u64,
}

/// A message or the end of a stream from a server.
pub enum Event {
    /// A block's new values.
    Block(Name, proto::ParameterBlock),
    /// The stream broke.
    Broken(Name, Status),
}

/// A training stream.
pub struct Lane {
    pub channel: Channel,
    gradients: mpsc::Sender<Result<Bytes, Status>>,
}

impl Lane {
    /// Opens it over `channel`; up to `queue` messages may wait there. What comes down goes to `events`.
    pub async fn open(
        name: Name,
        channel: Channel,
        open: proto::Open,
        queue: usize,
        buffers: &Buffers,
        events: &mpsc::UnboundedSender<Event>,
    ) -> Result<Self, Status> {
        let (gradients, outgoing) = mpsc::channel(queue);
        let open = frame::message(&proto::ExchangeRequest { message: Some(Message::Open(open)) });
        drop(gradients.try_send(Ok(open)));
        let mut incoming = call(channel.clone(), EXCHANGE, Outgoing::request(outgoing), buffers).await?;
        let events = events.clone();
        tokio::spawn(async move {
            let status = loop {
                match incoming.message().await {
                    Ok(Some(block)) => {
                        if events.send(Event::Block(name, block)).is_err() {
                            return; // The session is gone.
                        }
                    }
                    Ok(None) => break Status::unavailable("the server closed the stream"),
                    Err(status) => break status,
                }
            };
            // A session that is gone needs no message.
            drop(events.send(Event::Broken(name, status)));
        });
        Ok(Self { channel, gradients })
    }

    /// Sends one message. A broken stream drops it: its `Broken` event follows.
    pub fn send(&self, message: Bytes) {
        drop(self.gradients.try_send(Ok(message)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_connections_are_for_tls_and_for_who_asks() {
        let rows = [
            ("plain", None, false, 64, 1),
            ("plain, asked", Some(3), false, 2, 3),
            ("tls, no core to spare", None, true, 1, 1),
            ("tls, two cores", None, true, 2, 1),
            ("tls, six cores", None, true, 6, 3),
            ("tls, many cores", None, true, 64, 4),
            ("tls, asked", Some(1), true, 64, 1),
        ];
        for (label, asked, tls, cores, want) in rows {
            assert_eq!(connections(asked, tls, cores), want, "{label}");
        }
    }
}
