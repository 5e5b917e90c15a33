//! The runtime of a synchronous session.

use tokio::runtime::{Builder, Runtime};

use super::error::ClientError;

/// Starts a runtime that serves a session's connections on `threads` threads.
pub(super) fn network(threads: usize) -> Result<Runtime, ClientError> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name("psjobs-net").enable_all().build().map_err(ClientError::Runtime)
}
