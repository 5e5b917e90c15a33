//! Tests of servers and clients over real sockets, in one program: each program would compile and link the crate anew.

mod checkpoint_runs;
mod checkpoints;
mod connections;
mod elastic;
mod evaluation;
mod foreign_client;
mod fuzz_seeds;
mod hostile;
mod members;
mod overlapped_exchanges;
mod refusals;
mod replaced_servers;
mod replication;
mod sparse;
mod sparse_checkpoints;
mod sparse_replication;
mod support;
mod tls;
mod training;
