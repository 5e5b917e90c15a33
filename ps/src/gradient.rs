//! Gradient blocks, and arithmetic on them where they were received: little-endian f32 in a frame, in shared memory or
//! in the sum of a round.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::codec::Codec;
use crate::shm::Mapping;

/// A gradient block where it was received, checked to have the length of its block.
pub enum Gradient {
    /// A payload in a frame.
    Wire(Codec, Bytes),
    /// A range of memory shared with the trainer, which does not write there until it is answered.
    Shared(Arc<Mapping>, Range<usize>),
}

thread_local! {
    /// Scratch space for decoded gradients: each thread decodes one block at a time.
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
        seen.unwrap_or_else(|| self.with_values(elements, all_finite))
    }

    /// Calls `use_values` with the little-endian f32 values of a block of `elements`.
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

#[inline(always)]
fn any_exponent_full(values: &[[u8; 4]]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    values.iter().fold(0, |any, v| any | u32::from(u32::from_le_bytes(*v) & EXPONENT == EXPONENT)) != 0
}

/// Returns whether no element is NaN or infinity.
pub fn all_finite(gradient: &[[u8; 4]]) -> bool {
    !crate::simd::run(any_exponent_full, gradient)
}

/// Computes `sum += gradient`.
pub fn add(sum: &mut [[u8; 4]], gradient: &[[u8; 4]]) {
    #[inline(always)]
    fn kernel((sum, gradient): (&mut [[u8; 4]], &[[u8; 4]])) {
        for (sum, g) in sum.iter_mut().zip(gradient) {
            *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*g)).to_le_bytes();
        }
    }
    crate::simd::run(kernel, (sum, gradient));
}

/// Computes `sum /= contributors`.
pub fn scale(sum: &mut [[u8; 4]], contributors: f32) {
    #[inline(always)]
    fn kernel((sum, contributors): (&mut [[u8; 4]], f32)) {
        for sum in sum {
            *sum = (f32::from_le_bytes(*sum) / contributors).to_le_bytes();
        }
    }
    if contributors > 1.0 {
        crate::simd::run(kernel, (sum, contributors));
    }
}
