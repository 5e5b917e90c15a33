//! The services of a server.

mod batch_assignment;
pub mod coordination;
pub mod exchange;
pub mod first_call;
mod first_message;
pub mod frame_service;
pub mod metrics;
pub mod recovery;
pub mod replication;
pub mod servers_only;
pub mod sparse_tables;

use tonic::{Request, Status};

use crate::server::state::ServerState;
use crate::{proto, unknown_peers};

/// Returns the trainer of a message, or an error that names the missing fields.
fn trainer(id: Option<proto::TrainerId>) -> Result<proto::TrainerId, Status> {
    id.ok_or_else(|| Status::invalid_argument("the message has no trainer; set job_uid, index and incarnation"))
}

/// Takes the message out of a request, and the trainer that `id` takes out of the message. A caller that names this job is
/// known from then on. Whether the trainer may call is the caller's to check.
///
/// # Errors
/// If the message has no trainer.
fn caller<M>(
    state: &ServerState,
    request: Request<M>,
    id: impl FnOnce(&mut M) -> Option<proto::TrainerId>,
) -> Result<(M, proto::TrainerId), Status> {
    let (_, extensions, mut message) = request.into_parts();
    let id = trainer(id(&mut message))?;
    if id.job_uid == state.config.job_uid {
        unknown_peers::set_known(&extensions);
    }
    Ok((message, id))
}
