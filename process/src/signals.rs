//! SIGTERM and SIGINT in a trainer. Until training begins a signal ends the process; from then on the
//! first one asks it to finish its step and leave, and a second one ends it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// A number of a signal; the exit code of a process that it ended is 128 more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(pub u8);

impl Signal {
    #[must_use]
    pub fn exit_code(self) -> u8 {
        128 + self.0
    }
}

/// Hears the signals for the whole life of the process.
#[derive(Clone, Debug)]
pub struct Signals {
    /// A signal now ends the process.
    deadly: Arc<AtomicBool>,
    /// A signal was heard.
    stop: Arc<AtomicBool>,
    /// The last signal heard, 0 before the first.
    heard: Arc<AtomicUsize>,
}

impl Signals {
    /// Begins to hear.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn listen() -> io::Result<Self> {
        let signals = Self { deadly: Arc::new(AtomicBool::new(true)), stop: Arc::default(), heard: Arc::default() };
        for number in [SIGTERM, SIGINT] {
            // Handlers run in this order: a signal that finds the way open makes the next one deadly.
            flag::register_conditional_shutdown(number, 128 + number, Arc::clone(&signals.deadly))?;
            flag::register(number, Arc::clone(&signals.deadly))?;
            flag::register(number, Arc::clone(&signals.stop))?;
            flag::register_usize(number, Arc::clone(&signals.heard), number as usize)?;
        }
        Ok(signals)
    }

    /// From now on the first signal is only noted, for [`Signals::heard`].
    pub fn defer(&self) {
        self.deadly.store(false, Ordering::SeqCst);
    }

    /// Becomes true with the first signal.
    #[must_use]
    pub fn stop(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// The signal that asked to stop, if one did.
    #[must_use]
    pub fn heard(&self) -> Option<Signal> {
        match self.heard.load(Ordering::SeqCst) {
            0 => None,
            number => Some(Signal(number as u8)),
        }
    }
}
