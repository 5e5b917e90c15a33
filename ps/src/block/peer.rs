//! The server's end of a trainer's `Exchange` stream, as the blocks use it: sends answers, over the wire or through
//! memory shared with the trainer, and aborts the stream.

use std::sync::Arc;

use bytes::Bytes;
use psjobs_arithmetic::codec::{Codec, Encoder};
use tokio::sync::mpsc;
use tonic::Status;

use crate::proto;
use crate::shm::Mapping;
use crate::training_rules::TrainingRules;
use crate::wire::StreamAbort;
use crate::wire::{codec_number, frame};

/// The answer to a trainer's gradient: the values of a block.
pub struct Answer<'a> {
    /// The trainer's step.
    pub step: u64,
    /// Number of the block.
    pub block: u32,
    /// Number of updates applied to the block.
    pub version: u64,
    /// First element of the block in the flat parameter space.
    pub start: usize,
    /// Its values.
    pub values: &'a [f32],
}

impl Answer<'_> {
    /// Encodes the message, with the values in the codec that the job uses for parameters.
    #[must_use]
    pub fn encode(&self, rules: &TrainingRules) -> Bytes {
        let head = self.head(rules.parameters);
        let payload = Encoder::new(rules.parameters, 1.0).payload_len(self.values.len());
        frame::parameters(&rules.buffers, &head, payload, |payload| rules.parameters.write(self.values, payload))
    }

    /// Writes the values into memory that a trainer shares; returns the message that says so.
    #[must_use]
    pub fn write(&self, memory: &Mapping) -> Bytes {
        memory.write_parameters(self.start, self.values);
        frame::message(&self.head(Codec::F32))
    }

    fn head(&self, codec: Codec) -> proto::ParameterBlock {
        let &Self { step, block, version, .. } = self;
        proto::ParameterBlock { step, block, codec: codec_number::number(codec), version, payload: Bytes::new() }
    }
}

/// Memory that a trainer shares, in which it waits for the values of a pull. Clones refer to the same pull.
#[derive(Clone)]
pub struct PulledInto {
    /// The memory.
    pub memory: Arc<Mapping>,
    /// Aborted when a newer pull, or the end of the membership or of the epoch, ends this one. Afterwards the trainer may compute with
    /// what is in the memory.
    pub abort: StreamAbort,
}

/// A trainer's stream. Clones refer to the same one.
#[derive(Clone)]
pub struct Peer {
    trainer: u32,
    epoch: u64,
    answers: mpsc::Sender<Result<Bytes, Status>>,
    memory: Option<Arc<Mapping>>,
    abort: StreamAbort,
}

impl Peer {
    /// Creates the handle of a stream. `answers` should have room for one answer for each of the server's blocks: a
    /// trainer has one step in flight, so a full channel means that it does not read. `memory` is the memory that
    /// the trainer shares, if any; `abort` ends the stream.
    #[must_use]
    pub fn new(
        trainer: u32,
        epoch: u64,
        answers: mpsc::Sender<Result<Bytes, Status>>,
        memory: Option<Arc<Mapping>>,
        abort: StreamAbort,
    ) -> Self {
        Self { trainer, epoch, answers, memory, abort }
    }

    /// Returns the servers' epoch when the stream was opened.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the index of the trainer.
    #[must_use]
    pub fn trainer(&self) -> u32 {
        self.trainer
    }

    /// Returns whether the server has aborted the stream: blocks ignore messages of it that are still queued.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.abort.is_aborted()
    }

    /// Returns the memory that the trainer shares.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        self.memory.as_ref()
    }

    /// Answers the trainer. `last` caches the message that another trainer was just sent with these values, and its
    /// step. Aborts the stream of a trainer that does not read its answers.
    pub fn answer(&self, answer: &Answer, rules: &TrainingRules, last: &mut Option<(u64, Bytes)>) {
        let message = match (&self.memory, last) {
            (Some(memory), _) => answer.write(memory),
            (None, Some((step, message))) if *step == answer.step => message.clone(),
            (None, last) => last.insert((answer.step, answer.encode(rules))).1.clone(),
        };
        if let Err(mpsc::error::TrySendError::Full(_)) = self.answers.try_send(Ok(message)) {
            self.refuse(Status::resource_exhausted(format!(
                "trainer {} sends gradients but reads no answers; it is disconnected",
                self.trainer
            )));
        }
    }

    /// Aborts the stream with an error.
    pub fn refuse(&self, status: Status) {
        tracing::warn!(trainer = self.trainer, reason = status.message(), "stream refused");
        self.abort.abort(status);
    }
}
