//! Gradient blocks where they were received: in a frame or in shared memory.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use psjobs_arithmetic::codec::Codec;
use psjobs_arithmetic::sums::all_finite;

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
