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
/// need not ask it to step back each time. Frames that arrive meanwhile are late by as much. A caller that waits for
/// longer wakes the thread when it has its answer; the others need not.
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
    /// When the last one had its answer, or the first one of those that wait began to.
    since: Instant,
    /// True while the background thread polls the runtime.
    alone: bool,
    /// True while the background thread sleeps until a caller wakes it.
    awaits_caller: bool,
    ended: bool,
}

/// The next thing that the background thread does.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    /// It polls the runtime.
    Drive,
    /// It sleeps for this long.
    Sleep(Duration),
    /// It sleeps until the last caller has its answer.
    AwaitCaller,
}

impl State {
    fn turn(&self, now: Instant) -> Turn {
        let left = GRACE.saturating_sub(now.saturating_duration_since(self.since));
        match self.waiting {
            _ if !left.is_zero() => Turn::Sleep(left),
            0 => Turn::Drive,
            _ => Turn::AwaitCaller,
        }
    }
}

impl Driver {
    /// Starts the runtime and its thread.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let since = Instant::now();
        let state = State { waiting: 0, since, alone: false, awaits_caller: false, ended: false };
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
            if state.waiting == 0 {
                state.since = Instant::now();
            }
            state.waiting += 1;
            if state.alone {
                self.step_back.notify_one();
            }
        }
        let result = self.runtime.block_on(future);
        let mut state = self.state.lock();
        state.waiting -= 1;
        if state.waiting == 0 {
            state.since = Instant::now();
            if state.awaits_caller {
                self.changed.notify_all();
            }
        }
        result
    }

    fn idle(&self) {
        loop {
            let mut state = self.state.lock();
            loop {
                if state.ended {
                    return;
                }
                match state.turn(Instant::now()) {
                    Turn::Drive => break,
                    Turn::Sleep(left) => {
                        self.changed.wait_for(&mut state, left);
                    }
                    Turn::AwaitCaller => {
                        state.awaits_caller = true;
                        self.changed.wait(&mut state);
                        state.awaits_caller = false;
                    }
                }
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
        let state = |waiting, since| State { waiting, since, alone: false, awaits_caller: false, ended: false };
        let rows = [
            ("somebody waits since just now", state(1, start), start + GRACE / 2, Turn::Sleep(GRACE / 2)),
            ("somebody waits", state(1, start), start + 5 * GRACE, Turn::AwaitCaller),
            ("two wait", state(2, start), start + GRACE, Turn::AwaitCaller),
            ("just now", state(0, start), start + GRACE / 4, Turn::Sleep(GRACE * 3 / 4)),
            ("a while ago", state(0, start), start + GRACE, Turn::Drive),
            ("a caller was quicker than the clock", state(0, start + GRACE), start, Turn::Sleep(GRACE)),
        ];
        for (label, state, now, want) in rows {
            assert_eq!(state.turn(now), want, "{label}");
        }
    }

    #[test]
    fn a_caller_that_waited_long_wakes_the_thread() {
        let driver = Driver::start().expect("a thread");
        let inner = driver.inner();
        for n in 0..3 {
            inner.wait(async {
                let asleep = async {
                    while !inner.state.lock().awaits_caller {
                        tokio::time::sleep(GRACE / 4).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(10), asleep).await.expect("the thread sleeps meanwhile");
            });
            let (done, is_done) = std::sync::mpsc::channel();
            driver.handle().spawn(async move { done.send(n).expect("the test listens") });
            assert_eq!(is_done.recv_timeout(Duration::from_secs(10)), Ok(n));
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
