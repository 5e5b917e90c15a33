//! Sums of gradients where they were received, as little-endian f32.

use crate::simd;

/// Returns whether no element is NaN or infinity.
#[must_use]
pub fn all_finite(gradient: &[[u8; 4]]) -> bool {
    #[inline(always)]
    fn any_exponent_full(values: &[[u8; 4]]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        values.iter().fold(0, |any, v| any | u32::from(u32::from_le_bytes(*v) & EXPONENT == EXPONENT)) != 0
    }
    !simd::run(any_exponent_full, gradient)
}

/// Computes `sum += gradient`.
pub fn add(sum: &mut [[u8; 4]], gradient: &[[u8; 4]]) {
    #[inline(always)]
    fn kernel((sum, gradient): (&mut [[u8; 4]], &[[u8; 4]])) {
        for (sum, g) in sum.iter_mut().zip(gradient) {
            *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*g)).to_le_bytes();
        }
    }
    simd::run(kernel, (sum, gradient));
}

/// Computes `sum = first + second`.
pub fn add_to(sum: &mut [[u8; 4]], first: &[[u8; 4]], second: &[[u8; 4]]) {
    type Arguments<'a> = (&'a mut [[u8; 4]], &'a [[u8; 4]], &'a [[u8; 4]]);
    #[inline(always)]
    fn kernel((sum, first, second): Arguments) {
        for ((sum, a), b) in sum.iter_mut().zip(first).zip(second) {
            *sum = (f32::from_le_bytes(*a) + f32::from_le_bytes(*b)).to_le_bytes();
        }
    }
    simd::run(kernel, (sum, first, second));
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
        simd::run(kernel, (sum, contributors));
    }
}
