//! Drives the endpoint's single-threaded Tokio runtime: the thread that waits for a reply polls it, which saves two
//! context switches per call; otherwise a background thread does.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

/// The thread takes over when no caller has waited for this long: callers that follow one another closely
/// need not ask it to step back each time. Frames that arrive meanwhile are late by as much.
const GRACE: Duration = Duration::from_millis(1);

/// A runtime for one [`Endpoint`](crate::Endpoint). Dropping it ends it; drop it on an ordinary thread.
#[derive(Debug)]
pub struct Driver {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Single-threaded: one thread at a time polls it.
    runtime: Runtime,
    state: Mutex<State>,
    changed: Condvar,
    step_back: Notify,
}

#[derive(Debug)]
struct State {
    /// Number of callers that wait for an answer.
    waiting: usize,
    /// When the last one had its answer.
    last: Instant,
    /// True while the background thread polls the runtime.
    alone: bool,
    ended: bool,
}

impl State {
    /// Returns true if the background thread should poll the runtime.
    fn is_thread_due(&self, now: Instant) -> bool {
        self.waiting == 0 && now.saturating_duration_since(self.last) >= GRACE
    }
}

impl Driver {
    /// Starts the runtime and its thread.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let state = State { waiting: 0, last: Instant::now(), alone: false, ended: false };
        let inner = Inner { runtime, state: Mutex::new(state), changed: Condvar::new(), step_back: Notify::new() };
        let inner = Arc::new(inner);
        let idle = Arc::clone(&inner);
        let drive = move || {
            let _ends = EndsWithThread;
            idle.idle();
        };
        let thread = thread::Builder::new().name("psjobs-calls".into()).spawn(drive)?;
        Ok(Self { inner, thread: Some(thread) })
    }

    #[must_use]
    pub fn handle(&self) -> Handle {
        self.inner.runtime.handle().clone()
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.inner.state.lock().ended = true;
        self.inner.changed.notify_all();
        self.inner.step_back.notify_one();
        if let Some(thread) = self.thread.take() {
            // It ends at once, and has nothing to say.
            drop(thread.join());
        }
    }
}

/// Ends the process if the thread that holds it panics. Without that thread the connections stand still: peers would wait
/// for a process that lives and never answers, and nothing would start it again.
struct EndsWithThread;

impl Drop for EndsWithThread {
    fn drop(&mut self) {
        if thread::panicking() {
            // The panic was printed by its hook.
            std::process::abort();
        }
    }
}

impl Inner {
    /// Waits for `future`, polling the runtime meanwhile.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        {
            let mut state = self.state.lock();
            state.waiting += 1;
            if state.alone {
                self.step_back.notify_one();
            }
        }
        let result = self.runtime.block_on(future);
        let mut state = self.state.lock();
        state.waiting -= 1;
        state.last = Instant::now();
        result
    }

    fn idle(&self) {
        loop {
            let mut state = self.state.lock();
            while !state.ended && !state.is_thread_due(Instant::now()) {
                self.changed.wait_for(&mut state, GRACE);
            }
            if state.ended {
                return;
            }
            state.alone = true;
            drop(state);
            self.runtime.block_on(self.step_back.notified());
            self.state.lock().alone = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_waits_for_callers_and_a_while_after_them() {
        let start = Instant::now();
        let state = |waiting, last| State { waiting, last, alone: false, ended: false };
        let rows = [
            ("somebody waits", state(1, start), start + 5 * GRACE, false),
            ("just now", state(0, start), start + GRACE / 2, false),
            ("a while ago", state(0, start), start + GRACE, true),
            ("a caller was quicker than the clock", state(0, start + GRACE), start, false),
        ];
        for (label, state, now, want) in rows {
            assert_eq!(state.is_thread_due(now), want, "{label}");
        }
    }

    #[test]
    fn tasks_go_on_whoever_drives() {
        let driver = Driver::start().expect("a thread");
        let (send, mut receive) = tokio::sync::mpsc::unbounded_channel::<i32>();
        let (back, answers) = std::sync::mpsc::channel();
        driver.handle().spawn(async move {
            while let Some(n) = receive.recv().await {
                back.send(n).expect("the test listens");
            }
        });
        for n in 0..100 {
            send.send(n).expect("the task lives");
            if n % 3 == 0 {
                // A caller drives, also two at once.
                thread::scope(|scope| {
                    let yields = || driver.inner().wait(tokio::task::yield_now());
                    scope.spawn(yields);
                    yields();
                });
            }
            assert_eq!(answers.recv_timeout(Duration::from_secs(10)), Ok(n));
        }
    }
}
