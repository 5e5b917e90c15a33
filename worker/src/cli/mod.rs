//! The parts of a worker program's command line that need libtorch and do not depend on the workload.

pub mod custom_workload;
pub mod data_args;
pub mod evaluate;
pub mod train;
pub mod training_length;
