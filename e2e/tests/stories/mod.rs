//! What users do, and what they must see. One story a function.

pub mod broken;
pub mod elastic;
pub mod failure;
pub mod gpu;
pub mod invalid;
pub mod mnist;
pub mod nodes;
pub mod operators;
pub mod recovery;
pub mod speed;
pub mod suspend;
pub mod tls;
pub mod workloads;
