//! The largest elements by magnitude, exact (Lin et al., "Deep Gradient Compression", ICLR 2018,
//! without its momentum correction, because momentum is the server's): the rest waits in the
//! sender's feedback until it is large enough. A payload is k indices (u32, ascending), then their
//! k values (f32); k follows from its length. For gradients, with error feedback.

use super::{Codec, CodecError};

/// Every n-th element is looked at to guess where the k-th largest magnitude lies.
const SAMPLE_STRIDE: usize = 61;
/// Elements that are compared with the guess at once.
const GROUP: usize = 32;

/// Magnitude (as bits, which order as the magnitudes do) and index of an element.
pub(super) type Candidate = (u32, u32);

/// Elements that are sent of a block: the share `density`, rounded up, at least one.
#[must_use]
pub fn count(elements: usize, density: f64) -> usize {
    ((elements as f64 * density).ceil() as usize).clamp(1, elements.max(1)).min(elements)
}

/// Bytes of a payload with `count` elements.
#[must_use]
pub fn payload_len(count: usize) -> usize {
    count * 8
}

pub(super) fn check(payload: &[u8], elements: usize) -> Result<(), CodecError> {
    if !payload.len().is_multiple_of(8) || payload.len() / 8 > elements {
        return Err(CodecError::Length {
            codec: Codec::TopK,
            elements,
            expected: format!("a multiple of 8 up to {}", elements * 8),
            found: payload.len(),
        });
    }
    let mut low = 0;
    for (entry, bytes) in indices(payload).iter().enumerate() {
        let found = u32::from_le_bytes(*bytes);
        if u64::from(found) < low || found as usize >= elements {
            return Err(CodecError::Index { entry, low, high: elements as u64 - 1, found });
        }
        low = u64::from(found) + 1;
    }
    Ok(())
}

/// Adds the values at their places. The payload has been checked.
pub(super) fn scatter(payload: &[u8], out: &mut [f32]) {
    let (values, _) = payload[payload.len() / 2..].as_chunks::<4>();
    for (index, value) in indices(payload).iter().zip(values) {
        out[u32::from_le_bytes(*index) as usize] += f32::from_le_bytes(*value);
    }
}

fn indices(payload: &[u8]) -> &[[u8; 4]] {
    payload[..payload.len() / 2].as_chunks::<4>().0
}

pub(super) fn encode_rest(values: &mut [f32], payload: &mut [u8], candidates: &mut Vec<Candidate>) {
    let count = payload.len() / 8;
    largest(values, count, candidates);
    let (indices, kept) = payload.split_at_mut(count * 4);
    let slots = indices.as_chunks_mut::<4>().0.iter_mut().zip(kept.as_chunks_mut::<4>().0);
    for ((_, index), (index_bytes, value_bytes)) in candidates.iter().zip(slots) {
        *index_bytes = index.to_le_bytes();
        *value_bytes = std::mem::take(&mut values[*index as usize]).to_le_bytes();
    }
}

/// Leaves the `count` elements of largest magnitude in `candidates`, by ascending index; of equal
/// magnitudes the lower index wins. A guess from a sample spares sorting out nearly all
/// elements; a guess too high is noticed and the whole block is taken instead, so it is exact.
fn largest(values: &[f32], count: usize, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    if count == 0 {
        return;
    }
    let guess = guess_threshold(values, count, candidates);
    candidates.clear();
    crate::simd::run(at_least, (values, guess, &mut *candidates));
    if candidates.len() < count {
        candidates.clear();
        crate::simd::run(at_least, (values, 0, &mut *candidates));
    }
    let order = |a: &Candidate, b: &Candidate| b.0.cmp(&a.0).then(a.1.cmp(&b.1));
    candidates.select_nth_unstable_by(count - 1, order);
    candidates.truncate(count);
    candidates.sort_unstable_by_key(|(_, index)| *index);
}

/// A magnitude that somewhat more than `count` elements reach, going by a sample.
fn guess_threshold(values: &[f32], count: usize, sample: &mut Vec<Candidate>) -> u32 {
    sample.extend(values.iter().step_by(SAMPLE_STRIDE).map(|v| (magnitude(*v), 0)));
    let expected = count as f64 * sample.len() as f64 / values.len() as f64;
    // Four standard deviations of what a sample holds, so that going back to the block is rare.
    let rank = (expected + 4.0 * expected.sqrt() + 4.0) as usize;
    if rank >= sample.len() {
        return 0;
    }
    sample.select_nth_unstable_by(rank, |a, b| b.0.cmp(&a.0)).1.0
}

#[inline(always)]
fn at_least((values, threshold, candidates): (&[f32], u32, &mut Vec<Candidate>)) {
    let threshold = threshold as i32;
    for (group, values) in values.chunks(GROUP).enumerate() {
        // Without a branch for each element, the comparison of a group vectorizes.
        let any = values.iter().fold(false, |any, v| any | (magnitude(*v) as i32 >= threshold));
        if any {
            let first = group * GROUP;
            let reach = values.iter().enumerate().filter(|(_, v)| magnitude(**v) as i32 >= threshold);
            candidates.extend(reach.map(|(i, v)| (magnitude(*v), (first + i) as u32)));
        }
    }
}

#[inline(always)]
fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}
