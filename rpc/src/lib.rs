//! Remote objects and modules, and autograd over them.
//!
//! Every process of a job has an [`Endpoint`]. It hosts objects (state behind methods) and modules
//! (functions of parameters and inputs) that a [`Registry`] can make, and holds counted [`RRef`]s to
//! those of others. Calls travel over one gRPC stream for each pair of processes; either end calls the
//! other. [`autograd`] records calls of modules and takes them backwards.

pub mod autograd;
mod connect;
mod dispatch;
mod endpoint;
mod error;
mod link;
mod lock;
mod object;
mod object_table;
mod peer;
mod peers;
mod pending;
mod registry;
mod remote_refs;
pub mod rendezvous;
mod reply;
mod rref;
mod runtime_driver;
pub mod server_integration;
mod target;
mod value;
mod wire;

#[cfg(test)]
mod tests;

pub use connect::Service;
pub use endpoint::{Endpoint, Settings, Stats};
pub use error::RemoteError;
pub use object::{Call, Methods, RemoteObject};
pub use peer::Peer;
pub use pending::Pending;
pub use registry::Registry;
pub use rref::RRef;
pub use runtime_driver::Driver;
pub use value::{FromValue, FromValues, IntoValues, Value, Values};
