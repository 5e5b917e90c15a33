//! The tasks of a server that run beside its services.

pub mod evaluation;
pub mod liveness;
pub mod recovery;
pub mod replication;
pub mod series;
pub mod successor;
