//! The workloads that come with psjobs, with their models and data sets, and the program `psjobs-worker`, which
//! trains them.

pub mod allreduce;
pub mod cli;
pub mod data;
pub mod model;
pub mod workload;
