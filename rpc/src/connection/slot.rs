//! Hands the answer to a call to the thread that waits for it.

use std::future::poll_fn;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::runtime_driver::Inner;
use crate::error::RemoteError;

/// Receives one answer, for one thread that waits for it.
#[derive(Debug)]
pub(crate) struct Slot<A> {
    state: Mutex<State<A>>,
    filled: Condvar,
}

#[derive(Debug)]
struct State<A> {
    answer: Option<Result<A, RemoteError>>,
    awaited: Option<Awaited>,
}

/// How the thread waits, which decides how it is woken.
#[derive(Debug)]
enum Awaited {
    Asleep,
    Polled(Waker),
}

impl<A> Default for Slot<A> {
    fn default() -> Self {
        Self { state: Mutex::new(State { answer: None, awaited: None }), filled: Condvar::new() }
    }
}

impl<A> Slot<A> {
    pub fn fill(&self, answer: Result<A, RemoteError>) {
        let awaited = {
            let mut state = self.state.lock();
            state.answer = Some(answer);
            state.awaited.take()
        };
        match awaited {
            Some(Awaited::Asleep) => drop(self.filled.notify_all()),
            Some(Awaited::Polled(waker)) => waker.wake(),
            None => {}
        }
    }

    pub fn is_filled(&self) -> bool {
        self.state.lock().answer.is_some()
    }

    /// Waits until `deadline`; `None` when it passes.
    pub fn wait(&self, deadline: Instant) -> Option<Result<A, RemoteError>> {
        let mut state = self.state.lock();
        while state.answer.is_none() {
            let left = deadline.checked_duration_since(Instant::now())?;
            state.awaited = Some(Awaited::Asleep);
            self.filled.wait_for(&mut state, left);
        }
        state.answer.take()
    }

    /// Waits as [`Slot::wait`] does, and runs the connections meanwhile.
    pub fn wait_driving(&self, driver: &Inner, deadline: Instant) -> Option<Result<A, RemoteError>> {
        if let Some(answer) = self.state.lock().answer.take() {
            return Some(answer);
        }
        driver.wait(async { tokio::time::timeout_at(deadline.into(), poll_fn(|cx| self.poll(cx))).await.ok() })
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<A, RemoteError>> {
        let mut state = self.state.lock();
        match state.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                state.awaited = Some(Awaited::Polled(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}
