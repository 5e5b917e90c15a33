//! bfloat16: the upper 16 bits of an f32, rounded to nearest even. Range as f32, relative error at
//! most 2^-8. Used for gradients and for parameters on their way to the trainers.

use super::rest;

/// Fills `payload` (2 bytes an element) from `values`.
///
/// # Panics
/// If the lengths do not fit.
pub fn encode(values: &[f32], payload: &mut [u8]) {
    assert_eq!(payload.len(), values.len() * 2, "bf16 takes two bytes an element");
    crate::simd::run(encode_kernel, (values, payload));
}

#[inline(always)]
fn encode_kernel((values, payload): (&[f32], &mut [u8])) {
    for (value, bytes) in values.iter().zip(payload.as_chunks_mut::<2>().0) {
        *bytes = round(*value).to_le_bytes();
    }
}

#[inline(always)]
pub(super) fn encode_rest((values, payload): (&mut [f32], &mut [u8])) {
    for (value, bytes) in values.iter_mut().zip(payload.as_chunks_mut::<2>().0) {
        *bytes = send(*value, value);
    }
}

/// As [`encode_rest`] of `values + gradient`, in one pass.
#[inline(always)]
pub(super) fn encode_sum((values, gradient, payload): (&mut [f32], &[f32], &mut [u8])) {
    for ((value, gradient), bytes) in values.iter_mut().zip(gradient).zip(payload.as_chunks_mut::<2>().0) {
        *bytes = send(*value + gradient, value);
    }
}

#[inline(always)]
fn send(value: f32, left: &mut f32) -> [u8; 2] {
    let sent = round(value);
    *left = rest(value, widen(sent));
    sent.to_le_bytes()
}

#[inline(always)]
pub(super) fn for_each((payload, out, write): (&[u8], &mut [f32], impl Fn(&mut f32, f32))) {
    for (slot, bytes) in out.iter_mut().zip(payload.as_chunks::<2>().0) {
        write(slot, widen(u16::from_le_bytes(*bytes)));
    }
}

#[inline(always)]
fn widen(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Round to nearest even by integer arithmetic. A NaN keeps its upper bits and stays a NaN even
/// if its payload was in the lower ones.
#[inline(always)]
fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_half_crate_for_every_upper_half() {
        for upper in 0..=u32::from(u16::MAX) {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(upper << 16 | lower);
                assert_eq!(round(value), half::bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
