//! The controller: one reconcile reads the caches, decides, and carries the decision out.
//!
//! ```text
//! observed state -> validate -> decide -> create -> decide again -> write the status -> delete, record events
//! ```
//!
//! Deciding again after creating is what makes the status true at once: it counts the pods that the
//! API server returned, and names the ones that it refused.

mod build;
pub mod cache;
mod carry_out;
mod checkpoint_folder;
mod context;
mod decide;
mod error;
#[cfg(test)]
pub mod fixtures;
mod handover;
pub mod model;
pub mod observe;
mod reconcile;
mod run;
pub mod shard;
mod status_difference;
pub mod validate;
pub mod write;

pub use self::cache::watch::Watches;
pub use self::context::Context;
pub use self::error::ReconcileError;
pub use self::reconcile::reconcile;
pub use self::run::run;
