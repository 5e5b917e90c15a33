//! The soak: jobs of every kind run for a while under a seeded schedule of faults, and each must end as if nothing had
//! happened. `e2e/tests/soak.rs` is its program, `docs/reliability.md` describes what it checks.

mod board;
mod disk;
mod fleet;
mod guard;
mod job_run;
pub mod kind;
mod node_faults;
mod pod_faults;
mod result;
pub mod run;
pub mod schedule;
mod series;
mod stage;
mod trace;
pub mod verdict;
