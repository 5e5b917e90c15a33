//! Runs the bodies of calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::reply::Responder;
use super::state::Call;
use super::value::Answer;
use crate::error::RemoteError;

/// Runs the body of a call unless its time is over; a panic becomes an error.
pub(crate) fn run<T>(call: &Call, body: impl FnOnce() -> Result<T, RemoteError>) -> Result<T, RemoteError> {
    if Instant::now() >= call.deadline {
        return Err(RemoteError::new("its time was over before its turn came"));
    }
    // A body that panicked inside `no_grad` left the mode to its thread; each begins anew.
    catch_unwind(AssertUnwindSafe(|| tch::with_grad(body)))
        .unwrap_or_else(|payload| Err(RemoteError::from_panic(&*payload)))
}

/// Runs a body that may block or compute on a thread where that is allowed.
pub(crate) fn on_pool(
    call: Call,
    responder: Responder,
    body: impl FnOnce(&Call) -> Result<Answer, RemoteError> + Send + 'static,
) {
    let runtime = call.endpoint.connections().runtime.clone();
    runtime.spawn_blocking(move || responder.answer(run(&call, || body(&call))));
}
