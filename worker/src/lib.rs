//! Trains a workload in a job's pods, on libtorch: the training loop, its data loader, and the command line that
//! programs with workloads share. The parameter server itself is `psjobs-ps`, remote objects are `psjobs-rpc`, and
//! the workloads of `psjobs-worker` are `psjobs-workloads`. Nothing here knows Kubernetes.

pub mod cli;
pub mod data;
pub mod device;
pub mod libtorch;
pub mod train;
pub mod workload;

pub use cli::custom_workload::main;
pub use cli::train::Source;
/// libtorch's bindings, of the version that this crate uses.
pub use tch;
pub use workload::{Metrics, Workload};
