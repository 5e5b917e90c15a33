//! Tracking servers: the metrics, parameters and the model of a job as one run of MLflow. Server 0 follows the event files of
//! its own job and sends what they have; the run itself tells how far it is, so that a process that is started anew repeats
//! nothing. Training never waits for it.
//!
//! [`backlog`] decides what is sent next and [`durable`] up to which step, both from what is known alone. [`messages`] are the
//! requests and answers as JSON, [`client`] sends them, [`files`] reads the disk, [`model`] streams the model, [`progress`] tells
//! whether that goes on, and [`follow`] is the task that does it all.

mod backlog;
mod client;
mod durable;
mod error;
mod files;
mod follow;
mod messages;
mod model;
mod parameters;
mod progress;
mod settings;

#[cfg(test)]
mod tests;

pub use error::TrackingError;
pub use files::Folders;
pub use follow::{Ending, Follower, follow};
pub use messages::Job;
pub use parameters::flat;
pub use settings::Settings;
