//! The server's end of one trainer's `Exchange` stream, as the blocks see it: where gradients lie
//! and answers go, over the wire or in memory shared with the trainer, and a way to end the stream.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;

use super::hang_up::HangUp;
use super::recipe::Recipe;
use super::sum::finite;
use crate::codec::{Codec, Encoder};
use crate::proto;
use crate::shm::Mapping;
use crate::wire::frame;

/// A gradient, wherever it lies; checked to fit its block.
pub enum Gradient {
    /// It came in the frame.
    Wire(Codec, Bytes),
    /// The trainer left it in shared memory, and leaves it alone until it is answered.
    Shared(Arc<Mapping>, Range<usize>),
}

thread_local! {
    /// Where coded gradients are decoded: one block at a time on each thread.
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Gradient {
    /// The gradient as it was sent, for another server.
    #[must_use]
    pub fn as_sent(&self) -> (Codec, &[u8]) {
        match self {
            Self::Wire(codec, payload) => (*codec, payload),
            Self::Shared(memory, range) => (Codec::F32, memory.gradient_bytes(range.clone()).as_flattened()),
        }
    }

    /// Whether none of its values, for a block of `elements`, is NaN or infinity.
    #[must_use]
    pub fn is_finite(&self, elements: usize) -> bool {
        let seen = match self {
            Self::Wire(codec, payload) => codec.finite(payload),
            Self::Shared(..) => None,
        };
        seen.unwrap_or_else(|| self.with_values(elements, finite))
    }

    /// Calls `use_values` with the little-endian f32 of a block of `elements`.
    pub fn with_values<R>(&self, elements: usize, use_values: impl FnOnce(&[[u8; 4]]) -> R) -> R {
        match self {
            Self::Wire(Codec::F32, payload) => use_values(payload.as_chunks().0),
            Self::Wire(codec, payload) => DECODED.with_borrow_mut(|values| {
                values.resize(elements, 0.0);
                codec.decode(payload, values).expect("the payload was checked when it came in");
                use_values(bytemuck::cast_slice(values))
            }),
            Self::Shared(memory, range) => use_values(memory.gradient_bytes(range.clone())),
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

impl Answer<'_> {
    /// The message, with the values as the job sends parameters.
    #[must_use]
    pub fn encode(&self, recipe: &Recipe) -> Bytes {
        let head = self.head(recipe.parameters);
        let payload = Encoder::new(recipe.parameters, 1.0).payload_len(self.values.len());
        frame::parameters(&recipe.buffers, &head, payload, |payload| recipe.parameters.write(self.values, payload))
    }

    fn head(&self, codec: Codec) -> proto::ParameterBlock {
        let &Self { step, block, version, .. } = self;
        proto::ParameterBlock { step, block, codec: codec.number(), version, payload: Bytes::new() }
    }
}

/// Where a trainer's answers go. Cheap to clone.
#[derive(Clone)]
pub struct Peer {
    trainer: u32,
    epoch: u64,
    answers: mpsc::Sender<Result<Bytes, Status>>,
    memory: Option<Arc<Mapping>>,
    end: HangUp,
}

impl Peer {
    /// `answers` should hold one answer for each of the server's blocks: a trainer has one step in
    /// flight, so a full channel means that it does not read. `memory` is what the trainer shares,
    /// if it does; `end` ends the stream.
    #[must_use]
    pub fn new(
        trainer: u32,
        epoch: u64,
        answers: mpsc::Sender<Result<Bytes, Status>>,
        memory: Option<Arc<Mapping>>,
        end: HangUp,
    ) -> Self {
        Self { trainer, epoch, answers, memory, end }
    }

    /// The servers' epoch when the stream was opened.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Index of the trainer.
    #[must_use]
    pub fn trainer(&self) -> u32 {
        self.trainer
    }

    /// Whether the stream was ended from here: what it brought and no block has seen is not heard any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.end.has_ended()
    }

    /// What the trainer shares.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        self.memory.as_ref()
    }

    /// Answers a trainer. `last` is the message that another one just got with these values, by its
    /// step. Ends the stream of a trainer that does not read its answers.
    pub fn answer(&self, answer: &Answer, recipe: &Recipe, last: &mut Option<(u64, Bytes)>) {
        let message = match (&self.memory, last) {
            (Some(memory), _) => {
                memory.write_parameters(answer.start, answer.values);
                frame::message(&answer.head(Codec::F32))
            }
            (None, Some((step, message))) if *step == answer.step => message.clone(),
            (None, last) => last.insert((answer.step, answer.encode(recipe))).1.clone(),
        };
        if let Err(mpsc::error::TrySendError::Full(_)) = self.answers.try_send(Ok(message)) {
            self.refuse(Status::resource_exhausted(format!(
                "trainer {} sends gradients but reads no answers; it is disconnected",
                self.trainer
            )));
        }
    }

    /// Ends the stream with an error.
    pub fn refuse(&self, status: Status) {
        tracing::warn!(trainer = self.trainer, reason = status.message(), "stream refused");
        self.end.hang_up(status);
    }
}
