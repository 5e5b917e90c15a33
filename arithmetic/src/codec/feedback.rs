//! Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): what a lossy
//! codec left out of a block's gradient is added to the block's next gradient. Over time everything
//! is sent, so SGD converges as it does without compression.

use super::{Codec, Encoder, bf16, int8};

/// The rest of one block. It belongs to the sender and dies with it: a restarted trainer begins
/// with none, which costs at most the part of one step that its codec leaves out.
#[derive(Clone, Debug)]
pub struct Feedback {
    rest: Vec<f32>,
}

impl Feedback {
    /// For a block of `elements`; nothing is left over yet.
    #[must_use]
    pub fn new(elements: usize) -> Self {
        Self { rest: vec![0.0; elements] }
    }

    /// Fills `payload` with this step's gradient and what was left before. Call it once a step: a
    /// frame that is sent again is the same bytes again.
    ///
    /// # Panics
    /// If `gradient` has another length than the block, or `payload` is not
    /// `encoder.payload_len(gradient.len())` bytes long.
    pub fn encode(&mut self, encoder: &mut Encoder, gradient: &[f32], payload: &mut [u8]) {
        assert_eq!(gradient.len(), self.rest.len(), "a block keeps its length");
        assert_eq!(payload.len(), encoder.payload_len(gradient.len()), "the caller sizes the payload");
        match encoder.codec() {
            // The codecs of fast networks, where every pass over memory counts.
            Codec::Bf16 => crate::simd::run(bf16::encode_sum, (&mut self.rest, gradient, payload)),
            Codec::Int8 => crate::simd::run(int8::encode_sum, (&mut self.rest, gradient, payload)),
            _ => {
                crate::simd::run(add, (&mut self.rest, gradient));
                encoder.encode(&mut self.rest, payload);
            }
        }
    }

    /// Returns the error that waits for the next step.
    #[must_use]
    pub fn rest(&self) -> &[f32] {
        &self.rest
    }
}

#[inline(always)]
fn add((rest, gradient): (&mut [f32], &[f32])) {
    for (rest, gradient) in rest.iter_mut().zip(gradient) {
        *rest += gradient;
    }
}
