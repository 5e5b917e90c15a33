//! The workloads of `psjobs-worker train`: each joins a model, its data and its loss.

pub mod cartpole;
pub mod digits;
pub mod lm;
pub mod mnist_remote;
pub mod recsys;
pub mod rnn_remote;
pub mod torchscript;

use psjobs_process::serve::IDLE_GPUS;
use psjobs_rpc::{Registry, rendezvous};

/// Returns what a server hosts when a trainer asks for it. One that was given GPUs refuses what would leave them idle.
#[must_use]
pub fn offered(gpus: u32) -> Registry {
    let mut registry = Registry::default();
    mnist_remote::offer(&mut registry, gpus);
    rnn_remote::offer(&mut registry, gpus);
    match gpus {
        0 => rendezvous::offer(&mut registry),
        _ => rendezvous::refuse(&mut registry, IDLE_GPUS),
    }
    registry
}
