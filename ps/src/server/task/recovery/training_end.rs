//! The end of training for a server that is still busy with recovery.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::server::error::ServerError;
use crate::server::state::ServerState;

/// Timeout for the last checkpoint and the model after the end of training.
pub const LAST: Duration = Duration::from_secs(30);

/// Resolves when this server has nothing to recover any more: training was stopped; or it is done, and server 0 did not
/// get to its last checkpoint and the model in time.
///
/// # Errors
/// If the model is not known to be written.
pub async fn training_ended(state: &ServerState, training: &CancellationToken) -> Result<(), ServerError> {
    training.cancelled().await;
    if state.config.index != 0 || !state.members().done() {
        return Ok(());
    }
    tokio::time::sleep(LAST).await;
    let trouble = state.recovery.trouble();
    let why = trouble.unwrap_or_else(|| "the other servers did not say in time who leads their blocks".to_owned());
    Err(ServerError::NotKept { what: "the model", why: format!("{why}; the newest checkpoint is kept") })
}
