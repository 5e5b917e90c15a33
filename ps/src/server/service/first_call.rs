//! Limits the first call of a connection to a service that tonic reads for. Tonic takes memory for a message when its length is
//! announced, and gives the service a whole message, so that the service cannot ask in time who the caller is. Here the peer
//! becomes known by the first bytes of a message; until then a call has a place among few and a short message.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Request;
use http_body::{Body as HttpBody, Frame};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use crate::server::state::ServerState;
use crate::unknown_peers::{Peer, StreamPlace};
use crate::wire::MAX_FIRST_MESSAGE;
use crate::wire::frame::PREFIX;

/// Key of a field that has number 1 and a length.
const FIRST_FIELD: u8 = 0x0a;
/// Longest sequence of the keys and lengths in front of the uid, where the uid is the first field of the first field.
const ENVELOPE: usize = 2 * (1 + 10);

/// A service whose requests from unknown peers are limited. The requests begin with the uid of the caller's job, or are short.
#[derive(Clone)]
pub struct FirstCallLimit<S> {
    service: S,
    state: Arc<ServerState>,
    /// A request is one message.
    is_unary: bool,
}

impl<S> FirstCallLimit<S> {
    /// Limits a service whose requests are one message each.
    pub fn new(service: S, state: &Arc<ServerState>) -> Self {
        Self { service, state: state.clone(), is_unary: true }
    }

    /// Limits a service that answers before a request ends. The service itself limits the messages after the first.
    pub fn streaming(service: S, state: &Arc<ServerState>) -> Self {
        Self { is_unary: false, ..Self::new(service, state) }
    }
}

impl<S: NamedService> NamedService for FirstCallLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: tower::Service<Request<Body>>> tower::Service<Request<Body>> for FirstCallLimit<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let Some(peer) = request.extensions().get::<Peer>().filter(|peer| !peer.is_known()).cloned() else {
            return self.service.call(request);
        };
        let (state, is_unary) = (self.state.clone(), self.is_unary);
        let limited = |body| Limited {
            body,
            peer,
            state,
            is_unary,
            place: None,
            held: Vec::new(),
            trailers: None,
            passes: false,
            has_ended: false,
        };
        self.service.call(request.map(|body| Body::new(limited(body))))
    }
}

/// The body of a request whose peer was not known when it began.
struct Limited {
    body: Body,
    peer: Peer,
    state: Arc<ServerState>,
    is_unary: bool,
    /// Held until the peer is known, or the body is dropped.
    place: Option<StreamPlace>,
    /// Bytes that have come and are not passed on yet.
    held: Vec<u8>,
    trailers: Option<Frame<Bytes>>,
    /// The service gets what is held, and what follows.
    passes: bool,
    /// No more follows.
    has_ended: bool,
}

impl HttpBody for Limited {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        while !this.passes {
            if this.place.is_none() {
                this.place = this.state.unknown.enter(Some(&this.peer))?;
            }
            // A whole message is passed on at the end of the request only: the service would wait for the end with the
            // decoded message, which may take many times the memory.
            match ready!(Pin::new(&mut this.body).poll_frame(cx)).transpose()? {
                Some(frame) => match frame.into_data() {
                    Ok(data) => {
                        this.held.extend_from_slice(&data);
                        this.check()?;
                    }
                    Err(trailers) => (this.trailers, this.passes) = (Some(trailers), true),
                },
                None => (this.has_ended, this.passes) = (true, true),
            }
        }
        if !this.held.is_empty() {
            let held = Bytes::from(std::mem::take(&mut this.held));
            return Poll::Ready(Some(Ok(Frame::data(held))));
        }
        if let Some(trailers) = this.trailers.take() {
            return Poll::Ready(Some(Ok(trailers)));
        }
        if this.has_ended {
            return Poll::Ready(None);
        }
        Pin::new(&mut this.body).poll_frame(cx)
    }
}

impl Limited {
    /// Decides whether what is held may be passed on.
    ///
    /// # Errors
    /// If more has come than an unknown peer may send.
    fn check(&mut self) -> Result<(), Status> {
        let Some((prefix, message)) = self.held.split_first_chunk::<PREFIX>() else { return Ok(()) };
        let uid = &self.state.config.job_uid;
        if names_job(message, uid) {
            self.peer.set_known();
        }
        if self.peer.is_known() {
            (self.place, self.passes) = (None, true);
            return Ok(());
        }
        let [_, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_FIRST_MESSAGE && message.len() >= uid.len() + ENVELOPE {
            return Err(Status::failed_precondition(format!(
                "the first call of a connection has {length} bytes and does not begin with the uid of this server's job, as \
                 trainer.job_uid or job_uid: the caller belongs to another job; check the address and start both from one \
                 job. A client that writes the fields in another order first makes a call of at most {MAX_FIRST_MESSAGE} bytes"
            )));
        }
        if self.is_unary && message.len() > length {
            return Err(Status::invalid_argument("more than one message came in a request of one"));
        }
        self.passes = !self.is_unary && message.len() >= length;
        Ok(())
    }
}

/// Returns whether a message begins with the uid of the job: as its first field, or as the first field of that, a trainer.
fn names_job(message: &[u8], uid: &str) -> bool {
    let is_uid = |(length, rest): (usize, &[u8])| length == uid.len() && rest.starts_with(uid.as_bytes());
    let first = first_field(message);
    first.is_some_and(is_uid) || first.and_then(|(_, trainer)| first_field(trainer)).is_some_and(is_uid)
}

/// Returns the length of the first field of a message, and what follows this length; `None` if the message begins otherwise.
fn first_field(message: &[u8]) -> Option<(usize, &[u8])> {
    let (&FIRST_FIELD, mut rest) = message.split_first()? else { return None };
    let length = prost::decode_length_delimiter(&mut rest).ok()?;
    Some((length, rest))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::proto;

    #[test]
    fn a_message_names_the_job_by_its_first_bytes() {
        let uid = "0f6b1f5e-0001";
        let trainer = |job_uid: &str| Some(proto::TrainerId { job_uid: job_uid.into(), index: 300, incarnation: 2 });
        let join = |job_uid| proto::JoinRequest { trainer: trainer(job_uid), total_steps: 7, ..Default::default() };
        let restore = |job_uid: &str| proto::RestoreRequest { job_uid: job_uid.into(), epoch: 3, ..Default::default() };
        for (label, message, want) in [
            ("a trainer of the job", join(uid).encode_to_vec(), true),
            ("a server of the job", restore(uid).encode_to_vec(), true),
            ("a trainer of another", join("0f6b1f5e-0002").encode_to_vec(), false),
            ("a server of another", restore("0f6b1f5e-00").encode_to_vec(), false),
            ("a longer uid", join("0f6b1f5e-00011").encode_to_vec(), false),
            ("nothing", Vec::new(), false),
            ("no trainer", proto::JoinRequest { total_steps: 7, ..Default::default() }.encode_to_vec(), false),
            ("an endless length", vec![FIRST_FIELD, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], false),
        ] {
            assert_eq!(names_job(&message, uid), want, "{label}");
            // Not before the whole uid is there, and whatever follows.
            let named = (0..=message.len()).find(|&end| names_job(&message[..end], uid));
            assert!(named.is_none_or(|end| (uid.len()..=uid.len() + ENVELOPE).contains(&end)), "{label}: {named:?}");
        }
    }
}
