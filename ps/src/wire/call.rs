//! Calls whose messages are written and read by hand.

use std::future::poll_fn;

use http::{Request, StatusCode, header};
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::Service as _;

use super::{Buffers, Outgoing, Reader};

/// Calls the method at `path`; what comes back lies in memory of `buffers`.
///
/// # Errors
/// If the server cannot be reached, or says no at once.
pub async fn call(mut channel: Channel, path: &str, messages: Outgoing, buffers: &Buffers) -> Result<Reader, Status> {
    let broken = |error: tonic::transport::Error| Status::from_error(error.into());
    poll_fn(|context| channel.poll_ready(context)).await.map_err(broken)?;
    let request = Request::post(path)
        .header(header::TE, "trailers")
        .header(header::CONTENT_TYPE, "application/grpc")
        .body(Body::new(messages))
        .expect("method names are valid in a path");
    let response = channel.call(request).await.map_err(broken)?;
    if response.status() != StatusCode::OK {
        return Err(Status::unavailable(format!(
            "the peer answers HTTP {}; is it a psjobs server?",
            response.status()
        )));
    }
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => Ok(Reader::new(response.into_body(), buffers.clone())),
    }
}
