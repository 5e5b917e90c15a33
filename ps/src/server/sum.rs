//! Arithmetic on gradients where they lie, as little-endian f32: in a frame, in shared memory, in the sum of a
//! round.

#[inline(always)]
fn any_exponent_full(values: &[[u8; 4]]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    values.iter().fold(0, |any, v| any | u32::from(u32::from_le_bytes(*v) & EXPONENT == EXPONENT)) != 0
}

/// Whether no element is NaN or infinity.
pub fn finite(gradient: &[[u8; 4]]) -> bool {
    !crate::simd::run(any_exponent_full, gradient)
}

/// `sum += gradient`.
pub fn add(sum: &mut [[u8; 4]], gradient: &[[u8; 4]]) {
    #[inline(always)]
    fn kernel((sum, gradient): (&mut [[u8; 4]], &[[u8; 4]])) {
        for (sum, g) in sum.iter_mut().zip(gradient) {
            *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*g)).to_le_bytes();
        }
    }
    crate::simd::run(kernel, (sum, gradient));
}

/// `sum /= contributors`.
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
