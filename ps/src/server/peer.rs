//! The server's end of one trainer's `Exchange` stream, as the blocks see it: a bounded place for
//! answers, and a way to end the stream.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::proto;

/// Where a trainer's answers go. Cheap to clone.
#[derive(Clone)]
pub struct Peer {
    trainer: u32,
    answers: mpsc::Sender<Result<proto::ParameterBlock, Status>>,
    end: CancellationToken,
}

impl Peer {
    /// `answers` should hold one answer for each of the server's blocks: a trainer has one step in
    /// flight, so a full channel means that it does not read. `end` ends the stream.
    #[must_use]
    pub fn new(
        trainer: u32,
        answers: mpsc::Sender<Result<proto::ParameterBlock, Status>>,
        end: CancellationToken,
    ) -> Self {
        Self { trainer, answers, end }
    }

    /// Index of the trainer.
    #[must_use]
    pub fn trainer(&self) -> u32 {
        self.trainer
    }

    /// Sends an answer; ends the stream of a trainer that does not read its answers.
    pub fn answer(&self, block: proto::ParameterBlock) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.answers.try_send(Ok(block)) {
            tracing::warn!(trainer = self.trainer, "disconnected: it sends gradients but reads no answers");
            self.end.cancel();
        }
    }

    /// Ends the stream with an error.
    pub fn refuse(&self, status: Status) {
        tracing::warn!(trainer = self.trainer, reason = status.message(), "stream refused");
        // A stream that is full or gone gets no reason, only its end.
        drop(self.answers.try_send(Err(status)));
        self.end.cancel();
    }
}
