//! Where the time of a trainer goes, as it reports it.

use std::time::Duration;

use crate::proto;

/// The time that the steps of this process have taken so far, by part; see [`proto::TimeSpent`]. The exchange is not among the
/// parts here, because the session measures that itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeSpent {
    /// All of it, with the exchange and what is no part.
    pub total: Duration,
    /// In which the trainer waited for its next batch.
    pub data: Duration,
    /// Computing the loss.
    pub forward: Duration,
    /// Computing the gradient.
    pub backward: Duration,
    /// Both together, where they cannot be told apart.
    pub compute: Duration,
}

impl TimeSpent {
    /// Returns the message that says so, of a trainer whose exchanges have taken so long.
    pub(super) fn message(self, exchange: Duration) -> proto::TimeSpent {
        let Self { total, data, forward, backward, compute } = self;
        let [total, data, forward, backward, compute, exchange] =
            [total, data, forward, backward, compute, exchange].map(|time| time.as_secs_f64());
        proto::TimeSpent { total, data, forward, backward, compute, exchange }
    }
}
