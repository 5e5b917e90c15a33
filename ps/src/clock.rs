//! The time that decisions are given. It is tokio's, so that a paused clock stops it too.

use std::time::Instant;

/// Now.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
