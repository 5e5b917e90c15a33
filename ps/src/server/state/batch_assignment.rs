//! The assignment of batches in an elastic job, on server 0: the [`Dealer`] and the trainers that wait for it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::batch::dealer::Dealer;
use crate::proto;

/// The dealer and who waits for it.
#[derive(Default)]
pub struct Dealing {
    dealer: Mutex<Dealer>,
    /// Rung when a trainer comes.
    pub(in crate::server) came: Notify,
}

impl Dealing {
    /// The dealer, for a few assignments.
    pub fn dealer(&self) -> MutexGuard<'_, Dealer> {
        // Whatever a panic leaves behind, it deals on.
        self.dealer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a trainer says beside other things: how often it has entered, and how many batches it has done since.
    pub fn hear(&self, id: &proto::TrainerId, entry: u64, done: u64) {
        self.dealer().tell(id.index, (id.incarnation, entry), done);
    }

    /// A trainer has come: there may be enough.
    pub fn welcome(&self) {
        self.came.notify_waiters();
    }
}
