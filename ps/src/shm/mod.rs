//! Shared memory between a trainer and a server on one host. The trainer keeps its flat gradients
//! and parameters in a memory file; over a Unix socket it hands the file to the server, which maps
//! it too. From then on frames carry no payload: the server reads gradients where backward left them
//! and writes parameters where forward reads them. Where the socket cannot be reached (another
//! host, another network namespace) everything goes over TCP instead.

mod handshake;
mod mapping;

pub use handshake::{Offer, accept, offer};
pub use mapping::Mapping;
