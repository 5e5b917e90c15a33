//! What the tests on a real cluster stand on: a cluster with the chart installed, a namespace for
//! each test, and waits that watch, end at a deadline, and say what they waited for. The tests
//! themselves are in `tests/stories`.

pub mod cluster;
pub mod command;
pub mod dump;
pub mod logs;
pub mod manifest;
pub mod nodes;
pub mod operator;
pub mod site;
pub mod wait;
