//! One signed byte an element and a scale for each chunk of 256, so that one large element costs
//! its neighbours their precision and not the whole block. A chunk is the scale as f32, then its
//! bytes; the block's last chunk may be shorter. Error at most half the scale, which is the
//! chunk's largest magnitude over 127. For gradients, with error feedback.

use super::rest;

/// Elements that share a scale.
pub const CHUNK: usize = 256;
const SCALE_BYTES: usize = 4;

/// Chunks whose largest magnitude is below this are sent as zeros (and stay in the sender's rest):
/// 127 over it would overflow.
const TINY: f32 = 1e-36;

/// Adding this to a float below 2^22 rounds it to nearest even and leaves the integer in the low
/// bits: two instructions everywhere, where `round_ties_even` needs SSE4.1.
const ROUNDER: f32 = 12_582_912.0;

/// Bytes of a payload for `elements`.
#[must_use]
pub fn payload_len(elements: usize) -> usize {
    elements + elements.div_ceil(CHUNK) * SCALE_BYTES
}

#[inline(always)]
pub(super) fn encode_rest((values, payload): (&mut [f32], &mut [u8])) {
    for (values, chunk) in values.chunks_mut(CHUNK).zip(payload.chunks_mut(CHUNK + SCALE_BYTES)) {
        encode_chunk(values, chunk);
    }
}

/// As [`encode_rest`] of `values + gradient`, in one pass over memory.
#[inline(always)]
pub(super) fn encode_sum((values, gradient, payload): (&mut [f32], &[f32], &mut [u8])) {
    let chunks = values.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)).zip(payload.chunks_mut(CHUNK + SCALE_BYTES));
    for ((values, gradient), chunk) in chunks {
        for (value, gradient) in values.iter_mut().zip(gradient) {
            *value += gradient;
        }
        encode_chunk(values, chunk);
    }
}

#[inline(always)]
fn encode_chunk(values: &mut [f32], chunk: &mut [u8]) {
    let (scale_bytes, bytes) = chunk.split_at_mut(SCALE_BYTES);
    let (scale, inverse) = scales(values);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    for (value, byte) in values.iter_mut().zip(bytes) {
        let rounder = *value * inverse + ROUNDER;
        *byte = rounder.to_bits() as u8;
        *value = rest(*value, (rounder - ROUNDER) * scale);
    }
}

/// Returns whether no value is NaN or infinity: whether the largest magnitude of each chunk, times its scale, is finite.
pub(super) fn is_finite(payload: &[u8]) -> bool {
    payload.chunks(CHUNK + SCALE_BYTES).all(|chunk| {
        let (scale, bytes) = chunk.split_first_chunk().expect("the length was checked");
        let scale = f32::from_le_bytes(*scale);
        // All products are finite with such a scale, and senders write no other finite one: the bytes are looked at rarely.
        let is_small = scale.abs() <= f32::MAX / 128.0;
        is_small || bytes.iter().all(|byte| (f32::from(*byte as i8) * scale).is_finite())
    })
}

#[inline(always)]
pub(super) fn for_each((payload, out, write): (&[u8], &mut [f32], impl Fn(&mut f32, f32))) {
    for (out, chunk) in out.chunks_mut(CHUNK).zip(payload.chunks(CHUNK + SCALE_BYTES)) {
        let (scale, bytes) = chunk.split_first_chunk().expect("the length was checked");
        let scale = f32::from_le_bytes(*scale);
        for (slot, byte) in out.iter_mut().zip(bytes) {
            write(slot, f32::from(*byte as i8) * scale);
        }
    }
}

/// The scale and its inverse; (NaN, 0) if a value is not finite, so that the chunk decodes to NaN.
#[inline(always)]
fn scales(values: &[f32]) -> (f32, f32) {
    // Magnitudes order as their bits do, and integers have a maximum that vectorizes.
    let largest = values.iter().fold(0, |largest, v| largest.max(v.to_bits() as i32 & i32::MAX));
    let largest = f32::from_bits(largest as u32);
    match largest {
        _ if !largest.is_finite() => (f32::NAN, 0.0),
        _ if largest < TINY => (0.0, 0.0),
        _ => (largest / 127.0, 127.0 / largest),
    }
}
