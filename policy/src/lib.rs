//! Decides what a job's spec says about failures, success, startup, deadlines and elastic trainers. The operator asks it
//! about pods and `psjobs run` about processes, so that a job has the same policy on a cluster and on one machine.
//!
//! Everything here is a function of its arguments: replicas by role and index, exit codes, counts, and times as
//! durations. Neither pods nor processes appear, and nothing reads a clock. Files are named after the fields of the
//! spec; [`JobPolicy`] holds these fields.
#![deny(missing_docs)]

pub mod backoff;
#[cfg(any(test, feature = "cases"))]
pub mod cases;
pub mod deadlines;
pub mod elastic;
pub mod failure_policy;
mod job_policy;
pub mod startup_policy;
pub mod success_policy;

pub use deadlines::{Deadlines, Missed};
pub use elastic::Elastic;
pub use failure_policy::{Action, Failure, Response};
pub use job_policy::JobPolicy;
pub use success_policy::Success;
