//! Aborts a stream from the server's side: both directions end, and the other end receives the reason even if it does
//! not read the messages that are still queued for it.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Aborts one stream. Clones abort the same one.
#[derive(Clone, Debug, Default)]
pub struct StreamAbort {
    token: CancellationToken,
    why: Arc<OnceLock<Status>>,
}

impl StreamAbort {
    /// Aborts the stream with `why`. Only the first call sets the reason.
    pub fn abort(&self, why: Status) {
        // A second reason is ignored.
        drop(self.why.set(why));
        self.token.cancel();
    }

    /// Returns whether the stream has been aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until the stream is aborted and returns the reason. Cancel-safe.
    pub async fn aborted(self) -> Status {
        self.token.cancelled().await;
        self.why.get().cloned().unwrap_or_else(|| Status::aborted("the server has ended this stream"))
    }
}
