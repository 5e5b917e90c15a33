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
    #[error("this trainer cannot tell the others where it is")]
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
    /// Returns true if another process of the job is away, or was, and nothing else is wrong with this trainer.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        match self {
            Self::Join(error) | Self::Leave(error) => error.is_peer_away(),
            Self::Open(error) | Self::Follow(error) | Self::Evaluate(error) => error.is_peer_away(),
            Self::Rows { source, .. } => source.is_peer_away(),
            Self::Publish(error) => error.is_peer_away(),
            Self::Meet(error) => error.is_peer_away(),
            Self::Gradients { source, .. } => source.is_peer_away(),
            _ => false,
        }
    }

    /// Returns true if the cause lies in this trainer, so that the servers are to be told.
    pub(super) fn is_own(&self) -> bool {
        !self.is_peer_away() && !self.is_interruption()
    }

    /// Returns true if this trainer was asked to stop while it waited.
    pub(super) fn is_interruption(&self) -> bool {
        matches!(self, Self::Meet(RingError::Interrupted) | Self::Follow(ClientError::Interrupted))
    }
}
