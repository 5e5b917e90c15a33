//! The parameter server: who owns which parameters ([`layout`]), how they change ([`optimizer`]),
//! when ([`consistency`]), tables of rows by key ([`sparse`]), the process that holds them
//! ([`server`]) and what a trainer talks to it with ([`client`]). Knows neither libtorch nor Kubernetes.
#![deny(missing_docs)]

pub mod batch;
pub mod checkpoint;
pub mod client;
mod clock;
pub mod codec;
pub mod consistency;
pub mod layout;
pub mod network;
pub mod optimizer;
pub mod proto;
pub mod schedule;
pub mod server;
pub mod shm;
mod simd;
pub mod sparse;
pub mod splitmix;
pub mod staleness;
pub mod tls;
pub mod wire;
