//! Limits the first message of a stream, by which a peer becomes known: without certificates anybody who reaches the port can
//! send one, and memory for a message is taken when its length is announced.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

/// Size limit of the first frame. It lists what a peer holds of this process, some 20 bytes for each reference.
pub(super) const MAX_FIRST_FRAME: usize = 4 << 20;
/// Bytes before a gRPC message: whether it is compressed, and its length.
const HEADER: usize = 5;

/// A service whose requests begin with a message of at most [`MAX_FIRST_FRAME`].
#[derive(Clone)]
pub struct FirstFrameLimit<S>(pub(super) S);

impl<S: NamedService> NamedService for FirstFrameLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: tower::Service<http::Request<Body>>> tower::Service<http::Request<Body>> for FirstFrameLimit<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        self.0.call(request.map(|body| Body::new(Limited { body, header: Vec::new() })))
    }
}

/// A body that breaks off if its first message is too long.
struct Limited {
    body: Body,
    /// The first bytes so far, up to [`HEADER`].
    header: Vec<u8>,
}

impl HttpBody for Limited {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let next = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &next
            && let Some(data) = frame.data_ref()
            && self.header.len() < HEADER
        {
            let missing = HEADER - self.header.len();
            self.header.extend(data.iter().take(missing));
            check(&self.header)?;
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Checks the length in a header, if all of it is there.
fn check(header: &[u8]) -> Result<(), Status> {
    let Some((_, length)) = header.split_first_chunk::<1>() else { return Ok(()) };
    let Ok(length) = <[u8; 4]>::try_from(length) else { return Ok(()) };
    let length = u32::from_be_bytes(length) as usize;
    if length <= MAX_FIRST_FRAME {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "the first frame has {length} bytes, {MAX_FIRST_FRAME} are allowed before a peer has said who it is"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_checked_when_all_of_it_is_there() {
        for (header, allowed) in [
            (&[0_u8, 255, 255, 255][..], true),
            (&[0, 0, 64, 0, 0], true),
            (&[0, 0, 64, 0, 1], false),
            (&[1, 64, 0, 0, 0], false),
        ] {
            assert_eq!(check(header).is_ok(), allowed, "{header:?}");
        }
    }
}
