//! The contract between psjobs' parts: what a job looks like to Kubernetes ([`crd`], behind the
//! `crd` feature), the environment of every process of a job ([`env`]), what the job trains with
//! ([`training`], [`checkpoint`]), what they show each other over TLS ([`certificates`]), what server 0 reports to the
//! operator ([`progress`]) and to the page of a job ([`trainers_report`], [`series_report`]), the curves of both ([`curves`]), and what a
//! process leaves behind when it ends ([`result`]). No I/O.
#![deny(missing_docs)]

pub mod certificates;
pub mod checkpoint;
#[cfg(feature = "crd")]
pub mod crd;
pub mod curves;
pub mod env;
pub mod exit_code;
pub mod free_memory;
pub mod index_ranges;
pub mod progress;
mod replica;
pub mod result;
mod role;
pub mod series_report;
pub mod trainers_report;
pub mod training;

pub use env::Environment;
pub use progress::{FailedCheckpoint, TrainingStatus};
pub use replica::Replica;
pub use result::{CheckpointResult, ReplicaResult};
pub use role::Role;
pub use series_report::{SeriesCurve, SeriesReport};
pub use trainers_report::{TrainerReport, TrainerState, TrainersReport};
pub use training::Training;

/// The port that server 0 listens on by default; PyTorch's default master port.
pub const DEFAULT_PORT: u16 = 29500;
/// The port of `/metrics`, `/status`, `/trainers`, `/series`, `/healthz` and `/readyz` in a pod.
pub const METRICS_PORT: u16 = 9464;
