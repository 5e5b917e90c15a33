//! The services of a server.

mod batch_assignment;
pub mod coordination;
pub mod exchange;
mod first_message;
pub mod frame_service;
pub mod metrics;
pub mod recovery;
pub mod replication;
pub mod servers_only;
pub mod sparse_tables;

use tonic::Status;

use crate::proto;

/// Returns the trainer of a message, or an error that names the missing fields.
fn trainer(id: Option<proto::TrainerId>) -> Result<proto::TrainerId, Status> {
    id.ok_or_else(|| Status::invalid_argument("the message has no trainer; set job_uid, index and incarnation"))
}
