//! A body made of messages that tasks hand in.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, header};
use http_body::{Body, Frame};
use tokio::sync::mpsc;
use tonic::Status;

/// Messages shorter than this leave together with those that are ready behind them.
const SMALL: usize = 4 * 1024;

/// The sending side of one direction of a call. A server's ends with a status; a client's just ends.
pub struct Outgoing {
    messages: mpsc::Receiver<Result<Bytes, Status>>,
    /// Taken from the channel, to leave after what is sent now.
    next: Option<Result<Bytes, Status>>,
    trailers: bool,
    ended: bool,
    /// Ends it, whatever is still to be sent.
    cut: Option<Cut>,
}

/// Resolves to the status that a body is to end with.
type Cut = Pin<Box<dyn Future<Output = Status> + Send>>;

impl Outgoing {
    /// Creates the body of a request: it ends when the channel does, or at an error.
    #[must_use]
    pub fn request(messages: mpsc::Receiver<Result<Bytes, Status>>) -> Self {
        Self { messages, next: None, trailers: false, ended: false, cut: None }
    }

    /// Creates the body of a response: it ends with OK when the channel does, or with the first error.
    #[must_use]
    pub fn response(messages: mpsc::Receiver<Result<Bytes, Status>>) -> Self {
        Self { messages, next: None, trailers: true, ended: false, cut: None }
    }

    /// Ends it with the status that `cut` resolves to, with what is in the channel unsent. Who ends it so keeps the
    /// channel until then: a channel that all have let go of is a good end.
    #[must_use]
    pub fn until(mut self, cut: impl Future<Output = Status> + Send + 'static) -> Self {
        self.cut = Some(Box::pin(cut));
        self
    }

    /// The answer to a call.
    #[must_use]
    pub fn into_http(self) -> Response<tonic::body::Body> {
        let mut response = Response::new(tonic::body::Body::new(self));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        response
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Option<Status> {
        match self.cut.as_mut()?.as_mut().poll(cx) {
            Poll::Ready(status) => Some(status),
            Poll::Pending => None,
        }
    }

    fn end(&mut self, status: &Status) -> Option<Result<Frame<Bytes>, Infallible>> {
        self.ended = true;
        let mut trailers = HeaderMap::new();
        self.messages.close();
        if !self.trailers || status.add_header(&mut trailers).is_err() {
            return None;
        }
        Some(Ok(Frame::trailers(trailers)))
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        if let Some(status) = this.poll_cut(cx) {
            return Poll::Ready(this.end(&status));
        }
        let first = match this.next.take() {
            Some(first) => Some(first),
            None => ready!(this.messages.poll_recv(cx)),
        };
        let first = match first {
            Some(Ok(first)) => first,
            Some(Err(status)) => return Poll::Ready(this.end(&status)),
            // The side that ends it may have dropped the channel since the check above.
            None => {
                let status = this.poll_cut(cx).unwrap_or_else(|| Status::ok(""));
                return Poll::Ready(this.end(&status));
            }
        };
        if first.len() >= SMALL {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let mut together = BytesMut::new();
        while together.len() + first.len() < SMALL {
            match this.messages.try_recv() {
                Ok(Ok(more)) if more.len() < SMALL => together.extend_from_slice(&more),
                Ok(other) => {
                    this.next = Some(other);
                    break;
                }
                Err(_) => break,
            }
        }
        if together.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let mut all = BytesMut::with_capacity(first.len() + together.len());
        all.extend_from_slice(&first);
        all.extend_from_slice(&together);
        Poll::Ready(Some(Ok(Frame::data(all.freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
