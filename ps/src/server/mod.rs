//! The parameter server process. It takes a bound listener and runs until every trainer has left or it receives the
//! signal to stop.
//!
//! Each part uses only those before it: `config` and `error`, `state` (the members, blocks, streams and roles of one
//! server, behind short locks), `task` (what runs as time passes), `service` (the gRPC and HTTP services), `process`
//! (starts and stops all of it). The parameters are in `crate::block` and [`crate::sparse`].

mod config;
mod error;
mod process;
mod service;
mod state;
mod task;
mod trainers_report;

pub use config::{CheckpointConfig, Evaluation, Measurement, ServerConfig, Timeouts, inelastic};
pub use error::ServerError;
pub use process::{run, run_on};
