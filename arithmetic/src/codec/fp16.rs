//! IEEE half precision. Relative error at most 2^-11 between 6e-5 and 65504; finite values beyond
//! that saturate (error feedback carries the excess), values below 3e-8 vanish. Used for gradients
//! and for parameters on their way to the trainers.
//!
//! Converted by integer arithmetic without branches, which vectorizes on every CPU.

use super::rest;

/// Fills `payload` (2 bytes an element) from `values`.
///
/// # Panics
/// If the lengths do not fit.
pub fn encode(values: &[f32], payload: &mut [u8]) {
    assert_eq!(payload.len(), values.len() * 2, "fp16 takes two bytes an element");
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
        let sent = round(*value);
        *bytes = sent.to_le_bytes();
        *value = rest(*value, widen(sent));
    }
}

#[inline(always)]
pub(super) fn for_each((payload, out, write): (&[u8], &mut [f32], impl Fn(&mut f32, f32))) {
    for (slot, bytes) in out.iter_mut().zip(payload.as_chunks::<2>().0) {
        write(slot, widen(u16::from_le_bytes(*bytes)));
    }
}

/// Bits of infinity as f32; a NaN's are above.
const INFINITY: u32 = 0x7f80_0000;
/// Bits of 65504 as f32.
const LARGEST: u32 = 0x477f_e000;
/// Bits of 2^-14 as f32, the least normal half.
const LEAST_NORMAL: u32 = 0x3880_0000;

/// Round to nearest even; finite values saturate, infinities and NaN stay, for the receiver to see.
#[inline(always)]
fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let finite = magnitude.min(LARGEST);
    // The exponent's bias falls from 127 to 15; half an ulp, or just less where even, rounds.
    let normal = finite.wrapping_sub(112 << 23).wrapping_add(0xfff + (finite >> 13 & 1)) >> 13;
    // Adding 0.5 makes the FPU round to multiples of 2^-24, the step of subnormal halves.
    let subnormal = (f32::from_bits(finite) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let special = if magnitude > INFINITY { 0x7e00 } else { 0x7c00 };
    let half = if finite < LEAST_NORMAL { subnormal } else { normal };
    let half = if magnitude < INFINITY { half } else { special };
    (half | bits >> 16 & 0x8000) as u16
}

#[inline(always)]
fn widen(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let normal = (magnitude << 13) + (112 << 23);
    // Subnormal halves count steps of 2^-24. (Their bits as a subnormal f32 would cost a trap each.)
    let subnormal = (magnitude as i32 as f32 * 2.0_f32.powi(-24)).to_bits();
    let special = magnitude << 13 | INFINITY;
    let bits = if magnitude < 0x400 { subnormal } else { normal };
    let bits = if magnitude < 0x7c00 { bits } else { special };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_half_widens_as_in_the_half_crate() {
        for bits in 0..=u16::MAX {
            let want = f16::from_bits(bits).to_f32();
            assert!(widen(bits) == want || widen(bits).is_nan() && want.is_nan(), "{bits:#06x}");
        }
    }

    #[test]
    fn rounding_is_that_of_the_half_crate_but_saturates() {
        // All exponents and signs, with mantissas around every place where rounding turns.
        for upper in 0..=u32::from(u16::MAX) {
            for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0xffff] {
                let value = f32::from_bits(upper << 16 | lower);
                let want = match f16::from_f32(value) {
                    half if half.is_infinite() && value.is_finite() => f16::MAX.copysign(half),
                    half => half,
                };
                let found = f16::from_bits(round(value));
                assert!(found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan(), "{value:e}: {found}");
            }
        }
    }
}
