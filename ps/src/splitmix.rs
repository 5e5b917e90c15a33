//! SplitMix64 (Steele et al., OOPSLA 2014) as a hash: numbers that follow from a number alone, the same on every
//! machine.

/// Increment of the state from one number to the next.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Its output function: spreads the bits of `state` over all of the result's.
#[must_use]
pub fn finalize(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
