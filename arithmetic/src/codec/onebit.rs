//! One bit an element (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014): its
//! sign, and for each chunk of 512 the mean of the elements at or above zero and the mean of those
//! below, which keeps the chunk's sum. Useless without error feedback. For gradients.
//!
//! A chunk is 72 bytes: upper mean, lower mean, then 16 words of 32 bits. Element i of the chunk is
//! bit i / 16 of word i % 16, set if it takes the lower mean: so the words are made and
//! read side by side, with no shuffling of bits. The block's last chunk has zeros behind its end.

use super::rest;

/// Elements that share their two means.
pub const CHUNK: usize = 512;
const WORDS: usize = 16;
const CHUNK_BYTES: usize = 8 + CHUNK / 8;

/// Bytes of a payload for `elements`.
#[must_use]
pub fn payload_len(elements: usize) -> usize {
    elements.div_ceil(CHUNK) * CHUNK_BYTES
}

#[inline(always)]
pub(super) fn encode_rest((values, payload): (&mut [f32], &mut [u8])) {
    let (payload, _) = payload.as_chunks_mut::<CHUNK_BYTES>();
    let (full, tail) = values.as_chunks_mut::<CHUNK>();
    for (values, chunk) in full.iter_mut().zip(&mut *payload) {
        encode_chunk(values, CHUNK, chunk);
    }
    if let (false, Some(chunk)) = (tail.is_empty(), payload.last_mut()) {
        let mut padded = [0.0; CHUNK];
        padded[..tail.len()].copy_from_slice(tail);
        encode_chunk(&mut padded, tail.len(), chunk);
        tail.copy_from_slice(&padded[..tail.len()]);
    }
}

#[inline(always)]
fn encode_chunk(values: &mut [f32; CHUNK], len: usize, chunk: &mut [u8; CHUNK_BYTES]) {
    let mut words = [0_u32; WORDS];
    let mut sums = [[0.0_f32; WORDS]; 2];
    for (bit, row) in values.as_chunks::<WORDS>().0.iter().enumerate() {
        for (lane, value) in row.iter().enumerate() {
            let bits = value.to_bits();
            let negative = (bits as i32 >> 31) as u32;
            words[lane] |= (negative & 1) << bit;
            sums[0][lane] += f32::from_bits(bits & !negative);
            sums[1][lane] += f32::from_bits(bits & negative);
        }
    }
    let below = words.iter().map(|word| word.count_ones()).sum::<u32>();
    let counts = [len as u32 - below, below];
    let means: [f32; 2] = std::array::from_fn(|i| sums[i].iter().sum::<f32>() / counts[i].max(1) as f32);

    for (value, bytes) in means.iter().zip(chunk.as_chunks_mut::<4>().0) {
        *bytes = value.to_le_bytes();
    }
    for (word, bytes) in words.iter().zip(chunk[8..].as_chunks_mut::<4>().0) {
        *bytes = word.to_le_bytes();
    }
    for value in values {
        *value = rest(*value, if value.is_sign_negative() { means[1] } else { means[0] });
    }
}

#[inline(always)]
pub(super) fn for_each((payload, out, write): (&[u8], &mut [f32], impl Fn(&mut f32, f32))) {
    for (out, chunk) in out.chunks_mut(CHUNK).zip(payload.as_chunks::<CHUNK_BYTES>().0) {
        let (numbers, _) = chunk.as_chunks::<4>();
        let [upper, lower] = [numbers[0], numbers[1]].map(f32::from_le_bytes);
        let words: [u32; WORDS] = std::array::from_fn(|lane| u32::from_le_bytes(numbers[2 + lane]));
        for (bit, row) in out.chunks_mut(WORDS).enumerate() {
            for (slot, word) in row.iter_mut().zip(&words) {
                write(slot, if word >> bit & 1 == 0 { upper } else { lower });
            }
        }
    }
}
