//! The workloads of `psjobs-worker train`: each joins a model, its data and its loss.

pub mod cartpole;
pub mod digits;
pub mod lm;
pub mod mnist_remote;
pub mod recsys;
pub mod rnn_remote;
pub mod torchscript;

use psjobs_rpc::{Registry, rendezvous};

/// Returns what a server hosts when a trainer asks for it.
#[must_use]
pub fn offered() -> Registry {
    let mut registry = Registry::default();
    mnist_remote::offer(&mut registry);
    rnn_remote::offer(&mut registry);
    rendezvous::offer(&mut registry);
    registry
}
