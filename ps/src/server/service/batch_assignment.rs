//! Answers trainers of an elastic job that ask for batches. [`Dealer`] decides; a request waits here while there are
//! too few trainers.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;

use super::trainer;
use crate::batch::dealer::{Deal, Dealer, Question};
use crate::clock::now;
use crate::proto;
use crate::server::state::ServerState;

/// How long a question is held back that has no answer yet: a trainer that is told to stop notices when it is answered.
const HELD: Duration = Duration::from_secs(1);

/// Answers a trainer that asks for batches.
///
/// # Errors
/// If the job is not elastic, the trainer has to join again, or reckons with another number of batches than others.
pub async fn assign(
    state: &ServerState,
    request: proto::AssignBatchesRequest,
) -> Result<proto::AssignBatchesReply, Status> {
    let id = trainer(request.trainer.clone())?;
    let dealing = state.dealing.as_ref().ok_or_else(|| {
        Status::failed_precondition(
            "this server deals no batches; ask server 0 of an elastic job, which was started with --min-trainers",
        )
    })?;
    let until = Instant::now() + HELD;
    loop {
        let came = dealing.came.notified();
        let (present, enough) = {
            let mut members = state.members();
            members.hear(&id, now())?;
            members.present()
        };
        match ask(state, &mut dealing.dealer(), &id, &request, present, enough)? {
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
    state: &ServerState,
    dealer: &mut Dealer,
    id: &proto::TrainerId,
    request: &proto::AssignBatchesRequest,
    present: usize,
    enough: bool,
) -> Result<Deal, Status> {
    // Under the dealer's lock: it goes back when the servers do.
    state.check_epoch(request.epoch)?;
    dealer.expect(request.batches).map_err(|total| {
        Status::invalid_argument(format!(
            "trainer {} reckons with {} batches in all, the job has {total}; start all trainers with the same arguments \
             and data",
            id.index, request.batches
        ))
    })?;
    if state.config.checkpoint.is_none() {
        dealer.catch_up(request.seen.min(request.batches));
    }
    let process = (id.incarnation, request.entry);
    let question = Question { trainer: id.index, process, dealt: request.assigned, done: request.done };
    Ok(dealer.ask(question, present, enough))
}
