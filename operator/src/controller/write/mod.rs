//! Writes to the API server: children, statuses, deletes and events, in the order of their priority.

mod certificates;
pub mod children;
mod create;
pub mod delete;
pub mod events;
mod pods;
mod prerequisites;
pub mod request;
pub mod update_status;
pub mod write_priority;
pub mod writer;
