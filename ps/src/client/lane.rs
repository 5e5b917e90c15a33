//! One training stream, over a connection of its own.

use std::ops::Range;
use std::sync::Arc;
use std::thread::available_parallelism;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;

use super::landing::Landing;
use crate::proto::{self, exchange_request::Message};
use crate::shm::Mapping;
use crate::wire::{Buffers, Outgoing, Reader, call, frame};

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
    /// A block's new values have landed in the parameters; this is their message without them.
    Landed(Name, proto::ParameterBlock),
    /// The stream broke.
    Broken(Name, Status),
}

/// A training stream.
pub struct Lane {
    pub channel: Channel,
    gradients: mpsc::Sender<Result<Bytes, Status>>,
    landing: Arc<Landing>,
}

/// Where the messages of a stream are queued and what its answers are read into.
pub struct Memory<'a> {
    /// Messages that may wait to leave.
    pub queue: usize,
    /// The memory of answers that do not land.
    pub buffers: &'a Buffers,
    /// The mapping through which streams write parameters.
    pub parameters: &'a Arc<Mapping>,
}

impl Lane {
    /// Opens it over `channel`. What comes down goes to `events`.
    pub async fn open(
        name: Name,
        channel: Channel,
        open: proto::Open,
        memory: Memory<'_>,
        events: &mpsc::UnboundedSender<Event>,
    ) -> Result<Self, Status> {
        let (gradients, outgoing) = mpsc::channel(memory.queue);
        let open = frame::message(&proto::ExchangeRequest { message: Some(Message::Open(open)) });
        drop(gradients.try_send(Ok(open)));
        let mut incoming = call(channel.clone(), EXCHANGE, Outgoing::request(outgoing), memory.buffers).await?;
        let (events, landing) = (events.clone(), Arc::new(Landing::new(memory.parameters.clone())));
        let place = landing.clone();
        tokio::spawn(async move {
            let status = loop {
                match read_answer(name, &mut incoming, &place).await {
                    Ok(Some(Answer::Withdrawn)) => {}
                    Ok(Some(Answer::Counts(event))) => {
                        if events.send(event).is_err() {
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
        Ok(Self { channel, gradients, landing })
    }

    /// Lets the answer of `step` to a block land in the parameters, at `range`, as it comes.
    pub fn await_answer(&self, block: u32, step: u64, range: Range<usize>) {
        self.landing.await_answer(block, step, range);
    }

    /// Lets no answer land any more that has not done so.
    pub fn withdraw(&self) {
        self.landing.withdraw();
    }

    /// Sends one message. A broken stream drops it: its `Broken` event follows.
    pub fn send(&self, message: Bytes) {
        drop(self.gradients.try_send(Ok(message)));
    }
}

/// A stream whose place another one takes writes nothing any more.
impl Drop for Lane {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// An answer that was read.
enum Answer {
    /// The session is to hear of it.
    Counts(Event),
    /// The session awaits it no more; some of its values may be in place.
    Withdrawn,
}

/// Reads the next answer of a stream, its values into their place where it is awaited; `None` at a good end.
async fn read_answer(name: Name, incoming: &mut Reader, landing: &Landing) -> Result<Option<Answer>, Status> {
    let Some((mut block, length)) = incoming.block().await? else { return Ok(None) };
    if let Some(mut arriving) = landing.begin(&block, length) {
        incoming.pieces(length, |piece| landing.take(&mut arriving, piece)).await?;
        let landed = landing.end(&arriving).then_some(Answer::Counts(Event::Landed(name, block)));
        return Ok(Some(landed.unwrap_or(Answer::Withdrawn)));
    }
    if length > 0 {
        block.payload = incoming.bytes(length).await?;
    }
    Ok(Some(Answer::Counts(Event::Block(name, block))))
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
