//! Adds up the time for which each thread waits for other processes, so that a training loop can tell it from its own work.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

thread_local! {
    static STATE: Cell<State> = const { Cell::new(State { waited: Duration::ZERO, since: None }) };
}

/// Measures how long the thread that starts it waits for remote calls: for their answers, for a connection, and for their turn
/// where too many are in flight. A call counts from when the thread waits for it, not from when it was sent. A call within this
/// process does not count, and neither does a quick method that the thread runs while it waits: that is work of this process.
#[derive(Clone, Debug)]
pub struct WaitClock {
    before: Duration,
    /// Keeps the clock on its thread.
    thread: PhantomData<*const ()>,
}

impl WaitClock {
    /// Starts a clock on this thread.
    #[must_use]
    pub fn start() -> Self {
        Self { before: waited(), thread: PhantomData }
    }

    /// Returns how long the thread has waited since the clock was started.
    #[must_use]
    pub fn waited(&self) -> Duration {
        waited().saturating_sub(self.before)
    }
}

fn waited() -> Duration {
    let state = STATE.get();
    // The time is read only where it is needed.
    if state.since.is_none() { state.waited } else { state.waited(Instant::now()) }
}

/// This thread waits for another process until the result is dropped.
pub(crate) fn waits() -> Span {
    Span::begin(true)
}

/// This thread works until the result is dropped, also if it is waiting.
pub(crate) fn works() -> Span {
    Span::begin(false)
}

/// A span of time in which a thread waits or works. What it did before goes on when this is dropped.
#[must_use]
pub(crate) struct Span {
    waited_before: bool,
    /// Keeps the span on its thread.
    thread: PhantomData<*const ()>,
}

impl Span {
    fn begin(waits: bool) -> Self {
        Self { waited_before: set(waits), thread: PhantomData }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        set(self.waited_before);
    }
}

/// Sets whether this thread waits, and returns whether it did.
fn set(waits: bool) -> bool {
    let state = STATE.get();
    let waited_before = state.since.is_some();
    if waits != waited_before {
        STATE.set(state.turned(waits, Instant::now()));
    }
    waited_before
}

/// The waits of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    /// In the waits that have ended.
    waited: Duration,
    /// When the wait under way began.
    since: Option<Instant>,
}

impl State {
    fn waited(self, now: Instant) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// From `now` on the thread waits, or works.
    fn turned(self, waits: bool, now: Instant) -> Self {
        Self { waited: self.waited(now), since: waits.then_some(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quick::mark;

    #[test]
    fn only_the_time_between_the_beginning_and_the_end_of_a_wait_counts() {
        // The label, the turns, and the seconds that were waited at second 10.
        type Row = (&'static str, &'static [(bool, u64)], u64);
        let start = Instant::now();
        let (at, seconds) = (|second| start + Duration::from_secs(second), Duration::from_secs);
        let rows: [Row; 6] = [
            ("never", &[], 0),
            ("once", &[(true, 2), (false, 5)], 3),
            ("twice", &[(true, 1), (false, 2), (true, 4), (false, 8)], 5),
            ("still", &[(true, 7)], 3),
            ("begun and ended twice", &[(true, 2), (true, 3), (false, 5), (false, 6)], 3),
            ("a clock that went back", &[(true, 5), (false, 4)], 0),
        ];
        for (label, turns, want) in rows {
            let begin = State { waited: Duration::ZERO, since: None };
            let state = turns.iter().fold(begin, |state, &(waits, second)| state.turned(waits, at(second)));
            assert_eq!(state.waited(at(10)), seconds(want), "{label}");
        }
    }

    /// Works until the time has changed, and returns how long that took.
    fn work() -> Duration {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(2) {}
        start.elapsed()
    }

    #[test]
    fn a_quick_method_that_runs_within_a_wait_is_work() {
        let (clock, start) = (WaitClock::start(), Instant::now());
        let worked = {
            let _waits = waits();
            let before = mark(work);
            assert!(clock.waited() <= start.elapsed() - before, "it is not counted while the wait goes on");
            work();
            before + mark(work)
        };
        let (waited, elapsed) = (clock.waited(), start.elapsed());
        assert!(waited >= Duration::from_millis(2), "what is no quick method is part of the wait: {waited:?}");
        assert!(waited <= elapsed - worked, "{waited:?} of {elapsed:?}, of which {worked:?} were work");
        work();
        assert_eq!(clock.waited(), waited, "the wait is over");
        assert_eq!(WaitClock::start().waited(), Duration::ZERO);
        std::thread::scope(|scope| {
            drop(scope.spawn(|| assert_eq!(super::waited(), Duration::ZERO, "of another thread")))
        });
    }
}
