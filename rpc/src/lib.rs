//! Remote objects and modules, and autograd over them.
//!
//! Every process of a job has an [`Endpoint`]. It hosts objects (state behind methods) and modules
//! (functions of parameters and inputs) that a [`Registry`] can make, and holds counted [`RRef`]s to
//! those of others. Calls travel over one gRPC stream for each pair of processes; either end calls the
//! other. [`autograd`] records calls of modules and takes them backwards.
//!
//! `connection` knows nothing of objects, `objects` nothing of autograd; `endpoint` and `dispatch` join them.

pub mod autograd;
mod connection;
mod dispatch;
mod endpoint;
mod error;
mod ids;
mod objects;
mod proto;
mod quick;
pub mod rendezvous;
pub mod server_integration;
mod wait_clock;

#[cfg(test)]
mod tests;

pub use connection::{Absence, Driver, FirstFrameLimit, Service, Settings};
pub use endpoint::Stats;
pub use error::RemoteError;
pub use objects::{
    Call, Endpoint, FromValue, FromValues, IntoValues, Methods, Peer, Pending, RRef, Registry, RemoteObject, Value,
    Values,
};
pub use wait_clock::WaitClock;
