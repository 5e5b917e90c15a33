//! Connections between the processes of a job: one gRPC stream for each pair, with TLS where the job has
//! certificates, made again when it breaks, and kept alive by heartbeats that renew leases. A connection matches
//! replies to calls; what else arrives goes to the [`Process`] above.

mod attach;
mod connect;
mod first_frame;
mod lease;
mod link;
mod peers;
mod remote_refs;
mod runtime_driver;
mod sent;
mod slot;
mod state;

pub use connect::Service;
pub use first_frame::FirstFrameLimit;
pub use peers::Absence;
pub use runtime_driver::Driver;
pub use state::Settings;

pub(crate) use attach::link_to;
#[cfg(test)]
pub(crate) use attach::{attach, reconcile};
pub(crate) use connect::{connect, serve, service};
pub(crate) use lease::keep_leases;
pub(crate) use link::Link;
pub(crate) use runtime_driver::Inner;
pub(crate) use sent::Sent;
pub(crate) use slot::Slot;
pub(crate) use state::{Connections, Process};
