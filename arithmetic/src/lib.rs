//! The loops over floats of a parameter server: how a gradient changes a block ([`optimizer`], [`momentum`]), how a block is
//! coded where it travels ([`codec`]), and how gradients are added ([`sums`]). All of it works on slices in memory, without I/O, tasks or
//! clocks. It is a crate of its own so that a debug build compiles these loops, and nothing else, with all optimisations.
#![deny(missing_docs)]

pub mod codec;
pub mod momentum;
pub mod optimizer;
pub mod parameter_group;
mod simd;
pub mod sums;
