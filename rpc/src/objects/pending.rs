//! The typed result of a call that is under way.

use std::marker::PhantomData;
use std::sync::Arc;

use super::convert::FromValues;
use super::value::Answer;
use crate::connection::Sent;
use crate::error::RemoteError;

/// The result of an asynchronous call. Dropping it lets the call go on and discards its result.
#[derive(Debug)]
#[must_use = "wait for the result, or drop it on purpose"]
pub struct Pending<R> {
    sent: Sent<Answer>,
    result: PhantomData<fn() -> R>,
}

impl<R: FromValues> Pending<R> {
    pub(crate) fn new(sent: Sent<Answer>) -> Self {
        Self { sent, result: PhantomData }
    }

    /// Returns whether the result, or an error, is there, so that [`Pending::wait`] does not wait.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.sent.slot.is_filled()
    }

    /// Waits for the result, at most until the call's deadline.
    ///
    /// # Errors
    /// If the call failed, or its result is of another type.
    pub fn wait(self) -> Result<R, RemoteError> {
        let (peer, call) = (Arc::clone(&self.sent.peer), Arc::clone(&self.sent.call));
        R::from_values(self.sent.wait()?.values).map_err(|error| RemoteError::Failed {
            peer: peer.to_string(),
            call: call.to_string(),
            message: format!("its result is unexpected: {error}"),
        })
    }
}
