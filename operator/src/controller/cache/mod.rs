//! State that is kept in memory between reconciles: caches that watches fill, children that were created and that no
//! watch has shown yet, and the state of each job that is not in its status.

pub mod expectations;
pub mod job_state;
mod metadata;
mod nodes;
pub mod observed_state;
pub mod pods;
mod readable_jobs;
pub mod watch;
