//! Blocks of dense parameters. One task owns each block ([`task`]), so nothing is locked. [`Store`] holds the
//! senders of all tasks of a server and checks requests before a task sees them. Counters and the training rules are
//! handed in; nothing here knows the server around it.
//!
//! The files build on each other in this order: [`state`] (the block), [`snapshots`] (checkpoints), [`training`]
//! (gradients, by [`crate::aggregation`], and answers), [`replication`] (a second copy), [`task`] (dispatches commands).

mod block_busy_time;
mod command;
mod metrics;
mod peer;
mod replication;
mod snapshots;
mod state;
mod store;
mod task;
mod training;

pub use metrics::BlockMetrics;
pub use peer::{Peer, PulledInto};
pub use state::{BeforeStep, no_values};
pub use store::{Progress, Start, Store};

#[cfg(test)]
mod tests;
