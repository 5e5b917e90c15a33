//! The assignment of batches in an elastic job, on server 0: the [`BatchAssigner`] and the trainers that wait for it.

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::batch::assigner::BatchAssigner;
use crate::proto;

/// The assigner, and the requests that wait for trainers.
#[derive(Default)]
pub struct BatchAssignments {
    assigner: Mutex<BatchAssigner>,
    /// Notified when a trainer joins.
    pub(in crate::server) came: Notify,
}

impl BatchAssignments {
    /// Locks the assigner.
    pub fn assigner(&self) -> MutexGuard<'_, BatchAssigner> {
        // A panic under this lock leaves a state that batches can still be assigned from.
        self.assigner.lock()
    }

    /// Records what a heartbeat reports: how often a trainer has joined, and how many batches it has done since.
    pub fn hear(&self, id: &proto::TrainerId, entry: u64, done: u64) {
        self.assigner().record_done(id.index, (id.incarnation, entry), done);
    }

    /// Wakes waiting requests because a trainer has joined.
    pub fn welcome(&self) {
        self.came.notify_waiters();
    }
}
