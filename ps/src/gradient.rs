//! Gradient blocks where they were received: in a frame or in shared memory; and the sum of those of a round.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use psjobs_arithmetic::codec::Codec;
use psjobs_arithmetic::sums::{add, add_to, all_finite, scale};

use crate::shm::Mapping;
use crate::wire::Buffers;
use crate::wire::buffers::Buffer;

/// A gradient block where it was received, checked to have the length of its block.
pub enum Gradient {
    /// A payload in a frame.
    Wire(Codec, Bytes),
    /// A range of memory shared with the trainer, which does not write there until it is answered.
    Shared(Arc<Mapping>, Range<usize>),
}

thread_local! {
    /// Scratch space for gradients of codecs that decode whole payloads only: each thread decodes one block at a time.
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Gradient {
    /// Returns the gradient as it was sent, to forward it to a backup.
    #[must_use]
    pub fn as_sent(&self) -> (Codec, &[u8]) {
        match self {
            Self::Wire(codec, payload) => (*codec, payload),
            Self::Shared(memory, range) => (Codec::F32, memory.gradient_bytes(range.clone()).as_flattened()),
        }
    }

    /// Returns whether no value, for a block of `elements`, is NaN or infinity.
    #[must_use]
    pub fn is_finite(&self, elements: usize) -> bool {
        let seen = match self {
            Self::Wire(codec, payload) => codec.finite(payload),
            Self::Shared(..) => None,
        };
        seen.unwrap_or_else(|| {
            let mut is_finite = true;
            self.for_each_part(elements, |_, part| is_finite = is_finite && all_finite(part));
            is_finite
        })
    }

    /// Calls `take` with the little-endian f32 values of a block of `elements`, in parts that follow each other, and with the
    /// index of each part's first value. A gradient that needs no decoding is one part.
    pub fn for_each_part(&self, elements: usize, mut take: impl FnMut(usize, &[[u8; 4]])) {
        if let Some(values) = self.plain() {
            return take(0, values);
        }
        let Self::Wire(codec, payload) = self else { return };
        let decoded = DECODED.with_borrow_mut(|scratch| {
            codec.decode_in_parts(payload, elements, scratch, |start, part| take(start, bytemuck::cast_slice(part)))
        });
        decoded.expect("the payload was checked when it came in");
    }

    /// Returns the little-endian f32 values, if that is how they were received.
    fn plain(&self) -> Option<&[[u8; 4]]> {
        match self {
            Self::Wire(Codec::F32, payload) => Some(payload.as_chunks().0),
            Self::Wire(..) => None,
            Self::Shared(memory, range) => Some(memory.gradient_bytes(range.clone())),
        }
    }
}

/// The sum of the gradients of a round so far.
pub enum Sum {
    /// One gradient, where it was received.
    One(Gradient),
    /// Several, as little-endian f32.
    Several(Buffer),
}

impl Sum {
    /// Begins with a gradient for a block of `elements`. One in a frame stays there. One in shared memory does so if it `is_alone`
    /// in its round, which it then closes: else its trainer might write there before the round closes, when it gives up the step.
    #[must_use]
    pub fn begin(gradient: Gradient, elements: usize, buffers: &Buffers, is_alone: bool) -> Self {
        if is_alone || matches!(gradient, Gradient::Wire(..)) {
            return Self::One(gradient);
        }
        let mut sum = buffers.take(elements * 4);
        copy(&gradient, elements, sum.bytes_mut().as_chunks_mut().0);
        Self::Several(sum)
    }

    /// Adds a gradient.
    #[must_use]
    pub fn plus(self, gradient: &Gradient, elements: usize, buffers: &Buffers) -> Self {
        let mut sum = match self {
            Self::One(first) => {
                let mut sum = buffers.take(elements * 4);
                let target = sum.bytes_mut().as_chunks_mut::<4>().0;
                if let Some(first) = first.plain() {
                    gradient.for_each_part(elements, |start, part| {
                        let range = start..start + part.len();
                        add_to(&mut target[range.clone()], &first[range], part);
                    });
                    return Self::Several(sum);
                }
                copy(&first, elements, target);
                sum
            }
            Self::Several(sum) => sum,
        };
        let target = sum.bytes_mut().as_chunks_mut::<4>().0;
        gradient.for_each_part(elements, |start, part| add(&mut target[start..start + part.len()], part));
        Self::Several(sum)
    }

    /// Returns the mean of `contributors` gradients.
    #[must_use]
    pub fn mean(self, contributors: usize) -> Gradient {
        match self {
            Self::One(gradient) => gradient,
            Self::Several(mut sum) => {
                scale(sum.bytes_mut().as_chunks_mut().0, contributors as f32);
                Gradient::Wire(Codec::F32, sum.freeze())
            }
        }
    }
}

fn copy(gradient: &Gradient, elements: usize, target: &mut [[u8; 4]]) {
    gradient.for_each_part(elements, |start, part| target[start..start + part.len()].copy_from_slice(part));
}

#[cfg(test)]
mod tests {
    use psjobs_arithmetic::codec::Encoder;

    use super::*;

    const ELEMENTS: usize = 9_000;

    fn sent(codec: Codec, trainer: u32) -> Gradient {
        let hash = |i: u32| i.wrapping_add(trainer).wrapping_mul(2_654_435_761) as i32 as f32;
        let mut values: Vec<f32> = (0..ELEMENTS as u32).map(|i| hash(i) * 1e-8).collect();
        let mut encoder = Encoder::new(codec, 0.1);
        let mut payload = vec![0; encoder.payload_len(ELEMENTS)];
        encoder.encode(&mut values, &mut payload);
        Gradient::Wire(codec, payload.into())
    }

    fn shared(values: &[f32]) -> Gradient {
        let mut memory = Mapping::new(values.len()).expect("a memory file");
        memory.gradients_mut().copy_from_slice(values);
        Gradient::Shared(Arc::new(memory), 0..values.len())
    }

    fn values(gradient: &Gradient) -> Vec<f32> {
        let mut found = Vec::new();
        gradient.for_each_part(ELEMENTS, |start, part| {
            assert_eq!(start, found.len(), "parts follow each other");
            found.extend(part.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        });
        found
    }

    #[test]
    fn a_mean_is_that_of_the_decoded_gradients_in_their_order() {
        let buffers = Buffers::default();
        for codec in [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK] {
            for trainers in 1..4_u32 {
                let wants = (0..trainers).map(|trainer| values(&sent(codec, trainer)));
                let mut want =
                    wants.reduce(|sum, next| sum.iter().zip(next).map(|(a, b)| a + b).collect()).expect("one");
                want.iter_mut().for_each(|value| *value /= trainers as f32);
                for is_shared in [false, true] {
                    let given = |trainer| match sent(codec, trainer) {
                        gradient if is_shared => shared(&values(&gradient)),
                        gradient => gradient,
                    };
                    let mut sum = Sum::begin(given(0), ELEMENTS, &buffers, trainers == 1);
                    for trainer in 1..trainers {
                        sum = sum.plus(&given(trainer), ELEMENTS, &buffers);
                    }
                    let found = values(&sum.mean(trainers as usize));
                    assert!(found == want, "{codec}, {trainers} trainers, shared memory: {is_shared}");
                }
            }
        }
    }

    #[test]
    fn shared_memory_that_waits_for_others_is_copied() {
        let mut memory = Mapping::new(2).expect("a memory file");
        memory.gradients_mut().copy_from_slice(&[1.5, 2.5]);
        let server = Mapping::receive(memory.file().try_clone_to_owned().expect("a handle"), 2).expect("maps");
        let gradient = Gradient::Shared(Arc::new(server), 0..2);
        let sum = Sum::begin(gradient, 2, &Buffers::default(), false);
        // The trainer gives the step up, and computes another gradient.
        memory.gradients_mut().fill(9.0);
        let mut found = Vec::new();
        sum.mean(1).for_each_part(2, |_, part| found.extend(part.iter().map(|bytes| f32::from_le_bytes(*bytes))));
        assert_eq!(found, [1.5, 2.5]);
    }

    #[test]
    fn one_value_that_is_not_finite_is_seen_in_any_codec() {
        for codec in [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK] {
            assert!(sent(codec, 0).is_finite(ELEMENTS), "{codec}");
            let mut bad = vec![0.5; ELEMENTS];
            bad[ELEMENTS - 1] = f32::NAN;
            let mut encoder = Encoder::new(codec, 0.1);
            let mut payload = vec![0; encoder.payload_len(ELEMENTS)];
            encoder.encode(&mut bad, &mut payload);
            assert!(!Gradient::Wire(codec, payload.into()).is_finite(ELEMENTS), "{codec}");
        }
    }
}
