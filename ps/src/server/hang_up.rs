//! How the server ends a stream: both of its directions, and whoever is at the other end is told why, even if it
//! reads nothing of what is still queued for it.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Ends one stream. Clones end the same one.
#[derive(Clone, Debug, Default)]
pub struct HangUp {
    token: CancellationToken,
    why: Arc<OnceLock<Status>>,
}

impl HangUp {
    /// Ends the stream with `why`; the first one's reason counts.
    pub fn hang_up(&self, why: Status) {
        // Who comes second has nothing to add.
        drop(self.why.set(why));
        self.token.cancel();
    }

    /// Whether the stream has been ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits for the end; why it came. May be dropped at any time.
    pub async fn hung_up(self) -> Status {
        self.token.cancelled().await;
        self.why.get().cloned().unwrap_or_else(|| Status::aborted("the server has ended this stream"))
    }
}
