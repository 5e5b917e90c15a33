//! The parameter server: who owns which parameters ([`layout`]), when gradients change them
//! ([`consistency`], `aggregation`; how is in `psjobs-arithmetic`), the tasks that own them (`block`), tables of rows by key ([`sparse`]), the
//! process that holds them ([`server`]) and what a trainer talks to it with ([`client`]). Knows neither libtorch nor Kubernetes.
#![deny(missing_docs)]

mod address_limit;
mod aggregation;
pub mod batch;
mod block;
pub mod checkpoint;
pub mod client;
pub mod clock;
pub mod consistency;
mod counted_stream;
mod election_term;
mod gradient;
pub mod layout;
pub mod network;
pub mod open_files;
mod owner_tasks;
pub mod parameter_group;
pub mod peer_role;
pub mod proto;
mod replication_log;
pub mod retry;
pub mod schedule;
pub mod series;
pub mod server;
pub mod shm;
pub mod sparse;
pub mod splitmix;
pub mod staleness;
pub mod tls;
mod training_rules;
pub mod unknown_peers;
pub mod wire;
