//! Sums of flat f32 over all trainers of a job, by a ring of TCP connections: each trainer sends to the
//! next and receives from the one before (Patarasu and Yuan, JPDC 2009). [`order`] says who sends what
//! when, [`link`] moves it, [`connect`] finds the neighbours, [`ring`] does the sums on threads of its own
//! while the trainer computes, and [`buckets`] fills them from a backward pass.

pub mod buckets;
mod connect;
mod link;
pub mod order;
mod ring;
mod stream;

use std::io;
use std::time::Duration;

pub use connect::{Neighbours, Place};
pub use ring::Ring;
pub use stream::Identity;

/// How often a trainer that has nothing to send says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// A neighbour that has sent nothing for this long, not even a heartbeat, is lost. One whose process has
/// died is noticed at once.
pub const SILENCE: Duration = Duration::from_secs(20);

/// The trainers cannot add up their gradients.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    #[error("trainer {rank} is gone ({reason}), and the others cannot go on without it; see its log")]
    Lost { rank: u32, reason: String },
    #[error(
        "trainer {rank} sends {found} numbers where this one expects {want}; start all trainers with the same arguments"
    )]
    OtherLength { rank: u32, found: usize, want: usize },
    #[error("trainer {rank} speaks another protocol; start all trainers with the same version")]
    Protocol { rank: u32 },
    #[error("cannot listen for the other trainers")]
    Listen(#[source] io::Error),
    #[error("trainer {rank} did not come within {seconds} s ({reason}); see whether it runs")]
    Absent { rank: u32, seconds: u64, reason: String },
    #[error("told to stop while waiting for the other trainers")]
    Interrupted,
}
