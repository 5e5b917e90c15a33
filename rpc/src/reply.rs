//! The way back of an answer: over the connection that the call came from, or straight to a caller in
//! this process.

use std::sync::Arc;

use super::link::{Answer, Link, Slot};
use super::wire::{encode, proto};
use super::{Endpoint, RemoteError};

/// Owes one answer. Dropped without one, it says that the call will not run.
#[derive(Debug)]
pub(crate) struct Responder {
    target: Option<Target>,
}

#[derive(Debug)]
enum Target {
    Peer { endpoint: Endpoint, link: Arc<Link>, id: u64 },
    Here { slot: Arc<Slot>, peer: Arc<str>, call: String },
}

impl Responder {
    pub fn peer(endpoint: Endpoint, link: Arc<Link>, id: u64) -> Self {
        Self { target: Some(Target::Peer { endpoint, link, id }) }
    }

    pub fn here(slot: Arc<Slot>, peer: Arc<str>, call: String) -> Self {
        Self { target: Some(Target::Here { slot, peer, call }) }
    }

    pub fn answer(mut self, answer: Result<Answer, RemoteError>) {
        if let Some(target) = self.target.take() {
            target.answer(answer);
        }
    }
}

impl Target {
    fn answer(self, answer: Result<Answer, RemoteError>) {
        match self {
            Self::Here { slot, peer, call } => slot.fill(answer.map_err(|error| RemoteError::Failed {
                peer: peer.to_string(),
                call,
                message: error.to_string(),
            })),
            Self::Peer { endpoint, link, id } => {
                let reply = answer.and_then(|answer| {
                    let values = encode(&endpoint, &link, &answer.values)?;
                    Ok(proto::Reply { id, values, error: None, piece: answer.piece })
                });
                let reply = reply.unwrap_or_else(|error| proto::Reply {
                    id,
                    error: Some(proto::Error { message: error.to_string() }),
                    ..proto::Reply::default()
                });
                link.send(proto::frame::Kind::Reply(reply));
            }
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            target.answer(Err(RemoteError::new("the object was freed, or its process ended, before the call began")));
        }
    }
}
