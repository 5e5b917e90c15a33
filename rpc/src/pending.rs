//! A call that is under way.

use std::marker::PhantomData;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::link::{Answer, Link, Slot};
use super::object::must_not_wait;
use super::runtime_driver::Inner;
use super::{FromValues, RemoteError};

#[derive(Debug)]
pub(crate) struct Sent {
    pub slot: Arc<Slot>,
    pub deadline: Instant,
    pub timeout: Duration,
    pub call: String,
    pub peer: Arc<str>,
    /// What the waiting thread drives, if it is to.
    pub driver: Weak<Inner>,
    /// The connection and the call's number on it; `None` if it never left this process.
    pub over: Option<(Arc<Link>, u64)>,
}

impl Sent {
    pub fn wait(self) -> Result<Answer, RemoteError> {
        if must_not_wait() {
            return Err(RemoteError::new(format!("a quick method waits for {}; add it with `add`", self.call)));
        }
        let answer = match self.driver.upgrade() {
            Some(driver) => self.slot.wait_driving(&driver, self.deadline),
            None => self.slot.wait(self.deadline),
        };
        answer.unwrap_or_else(|| {
            let (peer, call) = (self.peer.to_string(), self.call.clone());
            Err(RemoteError::Deadline { peer, call, timeout: self.timeout })
        })
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some((link, id)) = &self.over {
            link.forget(*id);
        }
    }
}

/// The result of an asynchronous call. Dropped, the call goes on and its result is thrown away.
#[derive(Debug)]
#[must_use = "wait for the result, or drop it on purpose"]
pub struct Pending<R> {
    sent: Sent,
    result: PhantomData<fn() -> R>,
}

impl<R: FromValues> Pending<R> {
    pub(crate) fn new(sent: Sent) -> Self {
        Self { sent, result: PhantomData }
    }

    /// Waits for the result, at most until the call's deadline.
    ///
    /// # Errors
    /// What went wrong with the call, or that the result is of another type.
    pub fn wait(self) -> Result<R, RemoteError> {
        let (peer, call) = (self.sent.peer.to_string(), self.sent.call.clone());
        R::from_values(self.sent.wait()?.values).map_err(|error| RemoteError::Failed {
            peer,
            call,
            message: format!("its result is unexpected: {error}"),
        })
    }
}
