//! Builds the children of a job as objects. Names follow from the job, so that the API server itself refuses a second pod
//! of one rank.

mod certificates;
mod checkpoint;
mod colocated;
mod credentials;
mod defaults;
mod gang;
mod metadata;
mod network;
mod placement;
mod pod;
mod scheduling;
mod service;

pub use self::certificates::{SECRET_TYPE, secret};
pub use self::checkpoint::claim;
pub use self::gang::{Group, groups, scheduling_group};
pub use self::network::policy;
pub use self::pod::pod;
pub use self::service::service;

#[cfg(test)]
mod tests;
