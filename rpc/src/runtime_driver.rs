//! Drives the endpoint's single-threaded Tokio runtime: the thread that waits for a reply polls it, which saves two
//! context switches per call; otherwise a background thread does.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

use super::lock::lock;

/// The thread takes over when nobody has waited for this long: callers that follow one another closely
/// need not ask it to step back each time. What comes in meanwhile is late by as much.
const GRACE: Duration = Duration::from_millis(1);

/// A runtime for one [`Endpoint`](super::Endpoint). Dropped, it ends; drop it on an ordinary thread.
#[derive(Debug)]
pub struct Driver {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Of one thread: whoever blocks on it moves the bytes, one at a time.
    runtime: Runtime,
    turns: Mutex<Turns>,
    changed: Condvar,
    step_back: Notify,
}

#[derive(Debug)]
struct Turns {
    /// Callers that wait for an answer.
    waiting: usize,
    /// When the last one had its answer.
    last: Instant,
    /// The thread moves the bytes.
    alone: bool,
    ended: bool,
}

impl Turns {
    /// True if the thread should move the bytes.
    fn are_over(&self, now: Instant) -> bool {
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
        let turns = Turns { waiting: 0, last: Instant::now(), alone: false, ended: false };
        let inner = Inner { runtime, turns: Mutex::new(turns), changed: Condvar::new(), step_back: Notify::new() };
        let inner = Arc::new(inner);
        let idle = Arc::clone(&inner);
        let thread = thread::Builder::new().name("psjobs-calls".into()).spawn(move || idle.idle())?;
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
        lock(&self.inner.turns).ended = true;
        self.inner.changed.notify_all();
        self.inner.step_back.notify_one();
        if let Some(thread) = self.thread.take() {
            // It ends at once, and has nothing to say.
            drop(thread.join());
        }
    }
}

impl Inner {
    /// Waits for `future`, moving bytes meanwhile.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        {
            let mut turns = lock(&self.turns);
            turns.waiting += 1;
            if turns.alone {
                self.step_back.notify_one();
            }
        }
        let result = self.runtime.block_on(future);
        let mut turns = lock(&self.turns);
        turns.waiting -= 1;
        turns.last = Instant::now();
        result
    }

    fn idle(&self) {
        loop {
            let mut turns = lock(&self.turns);
            while !turns.ended && !turns.are_over(Instant::now()) {
                turns = self.changed.wait_timeout(turns, GRACE).unwrap_or_else(PoisonError::into_inner).0;
            }
            if turns.ended {
                return;
            }
            turns.alone = true;
            drop(turns);
            self.runtime.block_on(self.step_back.notified());
            lock(&self.turns).alone = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_waits_for_callers_and_a_while_after_them() {
        let start = Instant::now();
        let turns = |waiting, last| Turns { waiting, last, alone: false, ended: false };
        let rows = [
            ("somebody waits", turns(1, start), start + 5 * GRACE, false),
            ("just now", turns(0, start), start + GRACE / 2, false),
            ("a while ago", turns(0, start), start + GRACE, true),
            ("a caller was quicker than the clock", turns(0, start + GRACE), start, false),
        ];
        for (label, turns, now, want) in rows {
            assert_eq!(turns.are_over(now), want, "{label}");
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
