//! Data sets and the order in which trainers read them.

pub mod idx;
pub mod mnist;
pub mod sampler;
