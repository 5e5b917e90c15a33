//! Remote objects and modules, and autograd over them.
//!
//! Every process of a job has an [`Endpoint`]. It hosts objects (state behind methods) and modules
//! (functions of parameters and inputs) that a [`Registry`] can make, and holds counted [`RRef`]s to
//! those of others. Calls travel over one gRPC stream for each pair of processes; either end calls the
//! other. [`autograd`] records calls of modules and takes them backwards.

pub mod autograd;
mod connect;
mod driver;
mod endpoint;
mod error;
mod holdings;
mod host;
pub mod hosting;
mod inbox;
mod link;
mod object;
mod peer;
mod peers;
mod pending;
mod registry;
pub mod rendezvous;
mod respond;
mod rref;
mod value;
mod wire;

#[cfg(test)]
mod tests;

pub use connect::Service;
pub use driver::Driver;
pub use endpoint::{Endpoint, Settings, Stats};
pub use error::RemoteError;
pub use object::{Call, Methods, RemoteObject};
pub use peer::Peer;
pub use pending::Pending;
pub use registry::Registry;
pub use rref::RRef;
pub use value::{FromValue, FromValues, IntoValues, Value, Values};
