//! The time that decisions are given. It is tokio's, so that a paused clock stops it too.

use std::time::{Duration, Instant, SystemTime};

/// Now.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The times at which a process looks for peers that are silent.
#[derive(Debug, Default)]
pub struct Checks {
    last: Option<Instant>,
}

impl Checks {
    /// Records a check. Returns whether the one before was more than `pause` ago: this process stood still, and what peers sent meanwhile
    /// may not be read yet.
    pub fn come_late(&mut self, now: Instant, pause: Duration) -> bool {
        self.last.replace(now).is_some_and(|last| now.saturating_duration_since(last) > pause)
    }
}

/// Seconds since 1970 by the system's clock, which may jump: they are shown, and nothing is decided by them.
#[expect(clippy::disallowed_methods, reason = "it is shown only")]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
