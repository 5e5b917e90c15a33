//! Why training failed.

use psjobs_ps::client::ClientError;
use psjobs_ps::sparse::SpecError;
use psjobs_ps::tls::TlsError;
use psjobs_rpc::RemoteError;
use psjobs_worker::data::loader::LoaderEnded;
use psjobs_worker::data::sampler::TooFewExamples;
use psjobs_worker::train::modules::ModulesError;

use crate::allreduce::RingError;

/// Training failed.
#[derive(Debug, thiserror::Error)]
pub enum RecsysError {
    #[error(transparent)]
    TooFewExamples(#[from] TooFewExamples),
    #[error(transparent)]
    Table(#[from] SpecError),
    #[error("this trainer cannot begin")]
    Join(#[source] ModulesError),
    #[error("this trainer cannot begin")]
    Open(#[source] ClientError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("this trainer cannot send the others its address")]
    Publish(#[source] RemoteError),
    #[error("this trainer cannot meet the others")]
    Meet(#[source] RingError),
    #[error("this trainer cannot listen for the others")]
    Start(#[source] std::io::Error),
    #[error("this trainer cannot go on from where the servers are")]
    Follow(#[source] ClientError),
    #[error("this trainer has no data for step {step}")]
    Data { step: u64, source: LoaderEnded },
    #[error("this trainer cannot go on at step {step}")]
    Rows { step: u64, source: ClientError },
    #[error("this trainer cannot go on at step {step}")]
    Gradients { step: u64, source: RingError },
    #[error("the loss is {loss} at step {step}: training has diverged; lower the learning rate")]
    Diverged { step: u64, loss: f64 },
    #[error("the model is trained, but cannot be evaluated")]
    Evaluate(#[source] ClientError),
    #[error("this trainer is done, but cannot say so")]
    Leave(#[source] ModulesError),
}

impl RecsysError {
    /// Returns true if other processes alone end this trainer; see [`ClientError::is_caused_by_others`].
    #[must_use]
    pub fn is_caused_by_others(&self, supervised: bool) -> bool {
        match self {
            Self::Join(error) | Self::Leave(error) => error.is_caused_by_others(supervised),
            Self::Open(error) | Self::Follow(error) | Self::Evaluate(error) | Self::Rows { source: error, .. } => {
                error.is_caused_by_others(supervised)
            }
            Self::Publish(error) => error.is_peer_away(),
            Self::Meet(error) | Self::Gradients { source: error, .. } => error.is_peer_away(),
            Self::TooFewExamples(_)
            | Self::Table(_)
            | Self::Tls(_)
            | Self::Start(_)
            | Self::Data { .. }
            | Self::Diverged { .. } => false,
        }
    }

    /// Returns true if the cause lies in this trainer, so that the servers are to be notified.
    pub(super) fn is_own(&self) -> bool {
        match self {
            Self::Join(error) | Self::Leave(error) => error.is_own(),
            Self::Open(error) | Self::Follow(error) | Self::Evaluate(error) | Self::Rows { source: error, .. } => {
                error.is_own()
            }
            Self::Publish(error) => !error.is_peer_away(),
            Self::Meet(error) | Self::Gradients { source: error, .. } => {
                !error.is_peer_away() && !matches!(error, RingError::Interrupted)
            }
            Self::TooFewExamples(_)
            | Self::Table(_)
            | Self::Tls(_)
            | Self::Start(_)
            | Self::Data { .. }
            | Self::Diverged { .. } => true,
        }
    }

    /// Returns true if this trainer was asked to stop while it waited.
    pub(super) fn is_interruption(&self) -> bool {
        matches!(self, Self::Meet(RingError::Interrupted) | Self::Follow(ClientError::Interrupted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_are_notified_of_an_error_only_if_its_cause_lies_in_this_trainer() {
        let text = || String::from("no");
        let conflict = || ClientError::Conflict { address: text(), reason: text() };
        let misplaced = ClientError::Misplaced { address: text(), found: 1, servers: 2, want: 0, ours: 2 };
        let refused = ClientError::Refused { address: text(), reason: text() };
        let lost = RemoteError::Lost { peer: text(), call: text(), reason: text() };
        let other_length = RingError::OtherLength { rank: 1, found: 3, want: 4 };
        let rows = [
            (RecsysError::Join(ModulesError::Join(conflict())), false),
            (RecsysError::Leave(ModulesError::Leave(conflict())), false),
            (RecsysError::Open(misplaced), false),
            (RecsysError::Open(refused), true),
            (RecsysError::Follow(ClientError::Interrupted), false),
            (RecsysError::Follow(conflict()), false),
            (RecsysError::Rows { step: 3, source: ClientError::TablesLost { address: text() } }, false),
            (RecsysError::Rows { step: 3, source: conflict() }, false),
            (RecsysError::Publish(lost), false),
            (RecsysError::Publish(RemoteError::new("no")), true),
            (RecsysError::Meet(RingError::Interrupted), false),
            (RecsysError::Meet(RingError::Absent { rank: 1, seconds: 60, reason: text() }), false),
            (RecsysError::Gradients { step: 3, source: RingError::Lost { rank: 1, reason: text() } }, false),
            (RecsysError::Gradients { step: 3, source: other_length }, true),
            (RecsysError::Start(std::io::ErrorKind::AddrInUse.into()), true),
            (RecsysError::Diverged { step: 3, loss: f64::NAN }, true),
        ];
        for (error, want) in rows {
            assert_eq!(error.is_own(), want, "{error:?}");
        }
    }
}
