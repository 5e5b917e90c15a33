//! Support for the tests on a real cluster: a cluster with the chart installed, a namespace for each
//! test, and waits that watch, end at a deadline, and name what they waited for. The tests themselves
//! are in `tests/cases`; `soak` runs jobs of every kind under faults.

pub mod cluster;
pub mod command;
pub mod dump;
pub mod leftovers;
pub mod logs;
pub mod manifest;
pub mod namespace;
pub mod nodes;
pub mod operator;
pub mod soak;
pub mod wait;
