//! Durations that decisions and writes share: how long a status may wait before it is written.

use std::time::Duration;

/// How long the first status of a job may wait to be written: most jobs run soon after their pods were created.
pub const FIRST_STATUS_DEBOUNCE: Duration = Duration::from_secs(1);

/// How long the phase Completing may wait to be written: the servers mostly end soon after the trainers.
pub const COMPLETING_DEBOUNCE: Duration = Duration::from_secs(2);

/// How long a write waits for more urgent ones. After that it is sent, one overdue write at a time.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest that a decision may be older than the write of its status.
pub const MAX_STATUS_DELAY: Duration = COMPLETING_DEBOUNCE.saturating_add(WRITE_TIMEOUT);
