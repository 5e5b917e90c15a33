//! Sums of flat f32 over all trainers of a job, in a ring: each trainer sends to the next and receives from the one before
//! (Patarasu and Yuan, JPDC 2009). [`order`] decides who sends what when, [`inbox`] takes what arrives, [`neighbours`] sends
//! and receives over the job's remote calls, [`meeting`] connects the neighbours, [`ring`] does the sums on a thread of its
//! own while the trainer computes, and [`buckets`] fills them from a backward pass.

pub mod buckets;
mod inbox;
mod meeting;
mod neighbours;
pub mod order;
mod ring;

use psjobs_rpc::server_integration::trainer_name;

pub use inbox::Inbox;
pub use meeting::Meeting;
pub use neighbours::Neighbours;
pub use ring::Ring;

/// The rank of a trainer, and the number of trainers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub size: u32,
}

impl Place {
    #[must_use]
    pub fn before(self) -> u32 {
        (self.rank + self.size - 1) % self.size
    }

    #[must_use]
    pub fn next(self) -> u32 {
        (self.rank + 1) % self.size
    }
}

/// The trainers cannot add up their gradients.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    #[error("trainer {rank} is gone ({reason}), and the others cannot go on without it; see its log")]
    Lost { rank: u32, reason: String },
    #[error(
        "trainer {rank} sends {found} numbers where this one expects {want}; start all trainers with the same arguments"
    )]
    OtherLength { rank: u32, found: usize, want: usize },
    #[error("trainer {rank} did not come within {seconds} s ({reason}); see whether it runs")]
    Absent { rank: u32, seconds: u64, reason: String },
    #[error("trainer {rank} has finished, so it comes no more")]
    Finished { rank: u32 },
    #[error("interrupted while waiting for the other trainers")]
    Interrupted,
}

impl RingError {
    /// Returns true if another trainer is away, or was lost, and nothing else is wrong with this one.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Absent { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_that_is_away_or_lost_excuses_this_one() {
        let reason = || "connection refused".to_owned();
        let rows = [
            (RingError::Lost { rank: 1, reason: reason() }, true),
            (RingError::Absent { rank: 1, seconds: 60, reason: reason() }, true),
            (RingError::OtherLength { rank: 1, found: 3, want: 4 }, false),
            (RingError::Finished { rank: 1 }, false),
            (RingError::Interrupted, false),
        ];
        for (error, want) in rows {
            assert_eq!(error.is_peer_away(), want, "{error}");
        }
    }
}
