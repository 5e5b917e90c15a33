//! A call that waits for its answer.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::link::Link;
use super::runtime_driver::Inner;
use super::slot::Slot;
use crate::error::RemoteError;
use crate::quick::must_not_wait;
use crate::wait_clock::waits;

/// A call that was sent, and whose answer is an `A`.
#[derive(Debug)]
pub(crate) struct Sent<A> {
    pub slot: Arc<Slot<A>>,
    pub deadline: Instant,
    pub timeout: Duration,
    pub call: Arc<str>,
    pub peer: Arc<str>,
    /// Is polled by the thread that waits, if it still exists.
    pub driver: Weak<Inner>,
    /// The connection and the call's number on it; `None` for a call within this process.
    pub over: Option<(Arc<Link>, u64)>,
}

impl<A> Sent<A> {
    pub fn wait(self) -> Result<A, RemoteError> {
        if must_not_wait() {
            return Err(RemoteError::new(format!("a quick method waits for {}; add it with `add`", self.call)));
        }
        let answer = {
            let _waits = (self.over.is_some() && !self.slot.is_filled()).then(waits);
            match self.driver.upgrade() {
                Some(driver) => self.slot.wait_driving(&driver, self.deadline),
                None => self.slot.wait(self.deadline),
            }
        };
        answer.unwrap_or_else(|| {
            let (peer, call) = (self.peer.to_string(), self.call.to_string());
            Err(RemoteError::Deadline { peer, call, timeout: self.timeout })
        })
    }
}

impl<A> Drop for Sent<A> {
    fn drop(&mut self) {
        if let Some((link, id)) = &self.over {
            link.forget(*id);
        }
    }
}
