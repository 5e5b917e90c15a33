//! Answers trainers of an elastic job that ask for batches. [`BatchAssigner`] decides; a request waits here while there are
//! too few trainers.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;

use crate::batch::assigner::{Assignment, AssignmentRequest, BatchAssigner};
use crate::clock::now;
use crate::proto;
use crate::server::state::ServerState;

/// The longest time that a request waits for other trainers: a trainer that should stop notices it only between
/// requests.
const HELD: Duration = Duration::from_secs(1);

/// Answers a trainer that asks for batches.
///
/// # Errors
/// If the job is not elastic, the trainer has to join again, or reckons with another number of batches than others.
pub async fn assign(
    state: &ServerState,
    id: &proto::TrainerId,
    request: &proto::AssignBatchesRequest,
) -> Result<proto::AssignBatchesReply, Status> {
    let batch_assignments = state.batch_assignments.as_ref().ok_or_else(|| {
        Status::invalid_argument(
            "this server deals no batches; ask server 0 of an elastic job, which was started with --min-trainers",
        )
    })?;
    let until = Instant::now() + HELD;
    loop {
        let came = batch_assignments.came.notified();
        let (present, enough) = {
            let mut members = state.members();
            members.hear(id, now())?;
            members.present()
        };
        match ask(state, &mut batch_assignments.assigner(), id, request, present, enough)? {
            Assignment::Batches(batches) => {
                let count = (batches.end - batches.start) as u32;
                return Ok(proto::AssignBatchesReply { first: batches.start, count, wait: false });
            }
            Assignment::Nothing => return Ok(proto::AssignBatchesReply::default()),
            Assignment::Wait => {}
        }
        if tokio::time::timeout_at(until, came).await.is_err() {
            return Ok(proto::AssignBatchesReply { wait: true, ..proto::AssignBatchesReply::default() });
        }
    }
}

fn ask(
    state: &ServerState,
    assigner: &mut BatchAssigner,
    id: &proto::TrainerId,
    request: &proto::AssignBatchesRequest,
    present: usize,
    enough: bool,
) -> Result<Assignment, Status> {
    // Under the assigner's lock: it goes back when the servers do.
    state.check_epoch(request.epoch)?;
    assigner.expect(request.batches).map_err(|total| {
        Status::invalid_argument(format!(
            "trainer {} reckons with {} batches in all, the job has {total}; start all trainers with the same arguments \
             and data",
            id.index, request.batches
        ))
    })?;
    // A process that takes over from the other holder of its blocks looks for the newest checkpoint, which has the batches.
    if state.config.checkpoint.is_some() && state.recovery.run().is_none() {
        return Ok(Assignment::Wait);
    }
    let &proto::AssignBatchesRequest { entry, assigned, done, seen, batches, .. } = request;
    let (process, seen) = ((id.incarnation, entry), seen.min(batches));
    Ok(assigner.ask(AssignmentRequest { trainer: id.index, process, assigned, done, seen }, present, enough))
}
