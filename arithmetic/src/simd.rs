//! Runs a loop over floats with the widest vectors of this CPU. The loops are plain safe Rust that
//! the compiler vectorizes; here they are compiled a second time with AVX2 switched on and chosen
//! at run time, because a portable x86-64 binary may otherwise use no more than SSE2.
//!
//! Both versions give the same bits: the compiler neither fuses multiply with add nor reorders
//! sums, so vectors change the speed and nothing else.

/// Calls `kernel(args)`. The kernel must be a function marked `#[inline(always)]`, so that its body
/// is compiled inside the AVX2 version below.
#[inline]
pub(crate) fn run<A, R>(kernel: impl FnOnce(A) -> R, args: A) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2, as was asked just now; the function needs nothing else.
        #[allow(unsafe_code)]
        return unsafe { run_avx2(kernel, args) };
    }
    kernel(args)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<A, R>(kernel: impl FnOnce(A) -> R, args: A) -> R {
    kernel(args)
}

#[cfg(test)]
mod tests {
    #[inline(always)]
    fn norm((values, scale): (&[f32], f32)) -> f32 {
        values.iter().map(|v| v * scale + 0.1).fold(0.0, |sum, v| sum + v * v)
    }

    #[test]
    fn wide_vectors_do_not_change_the_result() {
        let values: Vec<f32> = (0..1001).map(|i| (i as f32).sin()).collect();
        let plain = norm((&values, 0.3));
        assert_eq!(super::run(norm, (values.as_slice(), 0.3)).to_bits(), plain.to_bits());
    }
}
