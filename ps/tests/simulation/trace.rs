//! The events of a run, in order: a digest by which two runs of one seed are compared, and lines for whoever
//! replays it.

use std::fmt::{self, Write as _};
use std::time::Duration;

use tokio::time::Instant;

/// The events of one run.
pub struct Trace {
    start: Instant,
    digest: u64,
    echo: bool,
}

impl Trace {
    /// Begins now; `echo` prints the events that [`Trace::log`] takes.
    pub fn new(echo: bool) -> Self {
        Self { start: Instant::now(), digest: 0, echo }
    }

    /// Time since the beginning.
    pub fn age(&self) -> Duration {
        self.start.elapsed()
    }

    /// An event that a reader wants to see.
    pub fn log(&mut self, event: fmt::Arguments) {
        if self.echo {
            println!("{:>9.3} s  {event}", self.age().as_secs_f64());
        }
        self.mark(event);
    }

    /// An event that only matters to the digest.
    pub fn mark(&mut self, event: fmt::Arguments) {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        // Writing to a hash cannot fail.
        let _ = write!(hash, "{} {event}", self.age().as_millis());
        self.digest = self.digest.wrapping_add(hash.0);
    }

    /// Equal for equal events at equal times, in whatever order those of one moment were.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

/// FNV-1a.
struct Hash(u64);

impl fmt::Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
