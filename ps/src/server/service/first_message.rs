//! Reads the first message of a stream, by which a peer becomes known. Until then a stream costs this server little memory,
//! for a short time, and few streams of unknown peers may be in that state at once.

use std::time::Duration;

use prost::Message;
use tonic::Status;

use crate::server::state::ServerState;
use crate::wire::Reader;

/// How long a peer may take to say who it is.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Reads the first message; `None` if the stream ends without one.
///
/// # Errors
/// If it does not come in time, is longer than it may be, or too many peers are unknown.
pub async fn first_message<M: Message + Default>(
    state: &ServerState,
    reader: &mut Reader,
) -> Result<Option<M>, Status> {
    let _place = state.unknown.enter(reader.peer())?;
    let timeout = TIMEOUT.min(state.config.timeouts.silence);
    tokio::time::timeout(timeout, reader.first_message()).await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs_f64();
        Err(Status::deadline_exceeded(format!("no message came in {seconds} s after the stream was opened")))
    })
}
