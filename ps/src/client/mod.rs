//! The client of the servers. [`Session`] is synchronous, because a training loop
//! is; behind it a runtime of its own keeps the streams and sends heartbeats while the trainer computes.
//! [`AsyncSession`] is the same on the runtime of its caller.

mod attendance;
mod ballots;
mod blocking;
mod coder;
mod config;
mod connecting;
mod error;
mod exchange;
mod first_step;
mod gradual_step;
mod landing;
mod lane;
mod last_heard;
mod layers;
mod link;
mod member;
mod momentum;
mod overlap_session;
mod reading;
mod recorder;
mod runtime;
mod session;
mod session_tables;
mod shares;
mod tables;
mod time_spent;
mod voting;

pub use blocking::Session;
pub use config::SessionConfig;
pub use error::ClientError;
pub(crate) use error::is_of_another_job;
pub use gradual_step::GradualStep;
pub use last_heard::LastHeard;
pub use layers::Layers;
pub use member::{AsyncMember, Member};
pub use overlap_session::{Ended, OverlapSession};
pub(crate) use reading::Reading;
pub use recorder::Recorder;
pub use session::AsyncSession;
pub use session_tables::SessionTables;
pub use tables::{AsyncTables, Pulling, Pushing, RowGradients, Tables};
pub use time_spent::TimeSpent;
pub use voting::Voting;

pub use crate::layout::TensorSpec;
