//! Makes messages of gradients: coded as the job asks, with error feedback where the codec loses
//! something.

use std::collections::BTreeMap;

use bytes::Bytes;
use psjobs_api::training::Compression;
use psjobs_arithmetic::codec::{Codec, Encoder, Feedback};

use crate::proto;
use crate::wire::{Buffers, codec_number, frame};

/// One trainer's coder.
pub struct Coder {
    codec: Codec,
    encoder: Encoder,
    feedback: BTreeMap<u32, Feedback>,
    /// Lossy messages until they are answered: one that is sent again must be the same again, because
    /// the feedback has gone on.
    sent: BTreeMap<u32, (u64, Bytes)>,
    buffers: Buffers,
}

impl Coder {
    /// A coder for a job with this `compression`; messages lie in memory of `buffers`.
    #[must_use]
    pub fn new(compression: &Compression, buffers: Buffers) -> Self {
        let codec = Codec::of_gradients(compression.codec);
        let encoder = Encoder::new(codec, compression.density);
        Self { codec, encoder, feedback: BTreeMap::new(), sent: BTreeMap::new(), buffers }
    }

    /// The message with the gradient `values` of `block` at `step`, computed from `version`.
    pub fn message(&mut self, step: u64, block: u32, version: u64, values: &[f32]) -> Bytes {
        let head = proto::GradientBlock {
            step,
            block,
            codec: codec_number::number(self.codec),
            version,
            payload: Bytes::new(),
        };
        let Self { codec, encoder, feedback, sent, buffers } = self;
        let payload = encoder.payload_len(values.len());
        if *codec == Codec::F32 {
            return frame::gradient(buffers, &head, payload, |payload| {
                payload.copy_from_slice(bytemuck::cast_slice(values));
            });
        }
        if let Some((_, message)) = sent.get(&block).filter(|(at, _)| *at == step) {
            return message.clone();
        }
        let feedback = feedback.entry(block).or_insert_with(|| Feedback::new(values.len()));
        let message = frame::gradient(buffers, &head, payload, |payload| feedback.encode(encoder, values, payload));
        sent.insert(block, (step, message.clone()));
        message
    }

    /// The message for a server that shares memory: the values are there already.
    #[must_use]
    pub fn notice(step: u64, block: u32, version: u64) -> Bytes {
        let gradient = proto::GradientBlock {
            step,
            block,
            codec: codec_number::number(Codec::F32),
            version,
            payload: Bytes::new(),
        };
        frame::message(&proto::ExchangeRequest { message: Some(proto::exchange_request::Message::Gradient(gradient)) })
    }

    /// The gradient of `block` has been answered.
    pub fn answered(&mut self, block: u32) {
        self.sent.remove(&block);
    }
}
