//! The time that decisions are given. It is tokio's, so that a paused clock stops it too.

use std::time::{Instant, SystemTime};

/// Now.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Seconds since 1970 by the system's clock, which may jump: they are shown, and nothing is decided by them.
#[expect(clippy::disallowed_methods, reason = "it is shown only")]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
