//! Deals the batches of an elastic job, on server 0: [`Dealer`] decides, what is here waits and keeps.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::Status;

use super::shared::{Shared, trainer};
use crate::batch::dealer::{Deal, Dealer, Question};
use crate::clock::now;
use crate::proto;

/// How long a question is held back that has no answer yet: a trainer that is told to stop notices when it is answered.
const HELD: Duration = Duration::from_secs(1);

/// The dealer and who waits for it.
#[derive(Default)]
pub struct Dealing {
    dealer: Mutex<Dealer>,
    /// Rung when a trainer comes.
    came: Notify,
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

/// Answers a trainer that asks for batches.
///
/// # Errors
/// If the job is not elastic, the trainer has to join again, or reckons with another number of batches than others.
pub async fn deal(shared: &Shared, request: proto::AssignBatchesRequest) -> Result<proto::AssignBatchesReply, Status> {
    let id = trainer(request.trainer.clone())?;
    let dealing = shared.dealing.as_ref().ok_or_else(|| {
        Status::failed_precondition(
            "this server deals no batches; ask server 0 of an elastic job, which was started with --min-trainers",
        )
    })?;
    let until = Instant::now() + HELD;
    loop {
        let came = dealing.came.notified();
        let (present, enough) = {
            let mut members = shared.members();
            members.hear(&id, now())?;
            members.present()
        };
        match ask(shared, &mut dealing.dealer(), &id, &request, present, enough)? {
            Deal::Batches(batches) => {
                let count = (batches.end - batches.start) as u32;
                return Ok(proto::AssignBatchesReply { first: batches.start, count, wait: false });
            }
            Deal::Nothing => return Ok(proto::AssignBatchesReply::default()),
            Deal::Wait => {}
        }
        if tokio::time::timeout_at(until, came).await.is_err() {
            return Ok(proto::AssignBatchesReply { wait: true, ..proto::AssignBatchesReply::default() });
        }
    }
}

fn ask(
    shared: &Shared,
    dealer: &mut Dealer,
    id: &proto::TrainerId,
    request: &proto::AssignBatchesRequest,
    present: usize,
    enough: bool,
) -> Result<Deal, Status> {
    // Under the dealer's lock: it goes back when the servers do.
    shared.check_epoch(request.epoch)?;
    dealer.expect(request.batches).map_err(|total| {
        Status::invalid_argument(format!(
            "trainer {} reckons with {} batches in all, the job has {total}; start all trainers with the same arguments \
             and data",
            id.index, request.batches
        ))
    })?;
    if shared.config.checkpoint.is_none() {
        dealer.catch_up(request.seen.min(request.batches));
    }
    let process = (id.incarnation, request.entry);
    let question = Question { trainer: id.index, process, dealt: request.assigned, done: request.done };
    Ok(dealer.ask(question, present, enough))
}
