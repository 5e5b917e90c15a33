//! Marks threads that run a quick method, and so must not wait.

use std::cell::Cell;

use crate::wait_clock::works;

thread_local! {
    static QUICK: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` with the thread marked.
pub(crate) fn mark<T>(body: impl FnOnce() -> T) -> T {
    // The thread may be one that waits for an answer, and runs the connections meanwhile.
    let _works = works();
    QUICK.set(true);
    let result = body();
    QUICK.set(false);
    result
}

/// Returns true on a thread that runs a quick method.
pub(crate) fn must_not_wait() -> bool {
    QUICK.get()
}
