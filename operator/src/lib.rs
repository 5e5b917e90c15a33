//! The operator: a controller for `ParameterServerJob`s, and what surrounds it in a process: flags,
//! leader election, progress, metrics and health. A manifest's path through it is described in [`controller`].

mod conditions;
pub mod controller;
mod error_chain;
pub mod http;
pub mod leader;
pub mod lease;
pub mod metrics;
pub mod operate;
pub mod progress;
pub mod settings;
pub mod traces;
mod trim;

pub use error_chain::chain;
