//! What runs in a job's pods: trainers and servers on libtorch. Models, data sets and the training
//! loop live here; the parameter server itself is `psjobs-ps`, and nothing here knows Kubernetes.

pub mod allreduce;
pub mod cli;
pub mod data;
pub mod device;
pub mod libtorch;
pub mod model;
pub mod remote;
pub mod train;
pub mod workload;

pub use cli::own::main;
pub use cli::train::Source;
/// libtorch's bindings, of the version that this crate uses.
pub use tch;
pub use workload::{Metrics, Workload};
