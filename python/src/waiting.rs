//! Waiting without the interpreter's lock, in a way that signals end.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use psjobs_ps::client::ClientError;
use pyo3::prelude::*;
use tokio::time::{Instant, timeout};

use super::errors::{Error, exception};

/// How soon Ctrl-C is answered.
const LOOK: Duration = Duration::from_millis(50);
/// How long a wait that was interrupted may take to end by itself.
const LAST: Duration = Duration::from_secs(6);

thread_local! {
    /// True while a wait on this thread runs handlers of signals.
    static RUNS_HANDLERS: Cell<bool> = const { Cell::new(false) };
}

/// Raises an error in a handler of a signal that a wait runs: the session is in use until the wait returns.
pub fn check_handler() -> PyResult<()> {
    if !RUNS_HANDLERS.get() {
        return Ok(());
    }
    let text = "a handler of a signal has called psjobs while this trainer waits for servers; let the handler set a \
                variable or raise an exception, and call psjobs when the step is done";
    Err(Error::new_err(text))
}

/// Asks a trainer that waits for servers to give up, from a handler of a signal for instance.
#[pyclass(frozen, module = "psjobs._native")]
#[derive(Default)]
pub struct Interrupt(pub Arc<AtomicBool>);

#[pymethods]
impl Interrupt {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Waits for `work`, on a thread without the interpreter's lock, and runs the handlers of signals meanwhile. An exception
/// of a handler, as KeyboardInterrupt is, ends the wait at once.
pub async fn attentive<T>(
    work: impl Future<Output = Result<T, ClientError>>,
    interrupt: &AtomicBool,
) -> Result<T, PyErr> {
    let mut work = pin!(work);
    let mut interrupted: Option<Instant> = None;
    loop {
        if let Ok(done) = timeout(LOOK, work.as_mut()).await {
            return done.map_err(|error| exception(&error));
        }
        RUNS_HANDLERS.set(true);
        let handled = Python::attach(|py| py.check_signals());
        RUNS_HANDLERS.set(false);
        if let Err(error) = handled {
            interrupt.store(true, Ordering::Relaxed);
            return Err(error);
        }
        if interrupt.load(Ordering::Relaxed) && interrupted.get_or_insert_with(Instant::now).elapsed() > LAST {
            return Err(exception(&ClientError::Interrupted));
        }
    }
}
