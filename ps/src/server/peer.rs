//! The server's end of one trainer's `Exchange` stream, as the blocks see it: where gradients lie
//! and answers go, over the wire or in memory shared with the trainer, and a way to end the stream.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::proto;
use crate::shm::Mapping;

/// A gradient, wherever it lies; checked to have its block's length.
pub enum Gradient {
    /// It came in the frame.
    Wire(Bytes),
    /// The trainer left it in shared memory, and leaves it alone until it is answered.
    Shared(Arc<Mapping>, Range<usize>),
}

impl Gradient {
    /// Little-endian f32.
    pub fn values(&self) -> &[[u8; 4]] {
        match self {
            Self::Wire(payload) => payload.as_chunks().0,
            Self::Shared(memory, range) => memory.gradient_bytes(range.clone()),
        }
    }
}

/// A block's values on their way to a trainer.
pub struct Answer<'a> {
    /// The trainer's step.
    pub step: u64,
    /// The block.
    pub block: u32,
    /// Updates of the block so far.
    pub version: u64,
    /// Place of the block in the flat space.
    pub start: usize,
    /// Its values.
    pub values: &'a [f32],
}

/// Where a trainer's answers go. Cheap to clone.
#[derive(Clone)]
pub struct Peer {
    trainer: u32,
    answers: mpsc::Sender<Result<proto::ParameterBlock, Status>>,
    memory: Option<Arc<Mapping>>,
    end: CancellationToken,
}

impl Peer {
    /// `answers` should hold one answer for each of the server's blocks: a trainer has one step in
    /// flight, so a full channel means that it does not read. `memory` is what the trainer shares,
    /// if it does; `end` ends the stream.
    #[must_use]
    pub fn new(
        trainer: u32,
        answers: mpsc::Sender<Result<proto::ParameterBlock, Status>>,
        memory: Option<Arc<Mapping>>,
        end: CancellationToken,
    ) -> Self {
        Self { trainer, answers, memory, end }
    }

    /// Index of the trainer.
    #[must_use]
    pub fn trainer(&self) -> u32 {
        self.trainer
    }

    /// What the trainer shares.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        self.memory.as_ref()
    }

    /// Answers a trainer; `encode` gives the values as they travel. Ends the stream of a trainer
    /// that does not read its answers.
    pub fn answer(&self, answer: &Answer, encode: impl FnOnce() -> Bytes) {
        let payload = match &self.memory {
            None => encode(),
            Some(memory) => {
                memory.write_parameters(answer.start, answer.values);
                Bytes::new()
            }
        };
        let &Answer { step, block, version, .. } = answer;
        let block = proto::ParameterBlock { step, block, codec: proto::Codec::F32.into(), version, payload };
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
