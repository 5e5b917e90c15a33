//! The floating-point types of a trainer (`spec.training.precision`): autocast to bf16, and TF32. libtorch's bindings have autocast
//! for GPUs alone and with half precision, and nothing of TF32; `precision.cpp` calls libtorch.

// The functions are C++; each call says why it is sound.
#![allow(unsafe_code)]

unsafe extern "C" {
    /// Begins autocast to bf16, on CPUs and GPUs, for what this thread computes.
    fn psjobs_enter_autocast();

    /// Ends it.
    fn psjobs_leave_autocast();

    /// Lets GPUs multiply and convolve f32 in TF32, or not.
    fn psjobs_allow_tf32(allowed: bool);
}

/// Autocast on this thread, until this is dropped.
struct Autocast;

impl Autocast {
    fn enter() -> Self {
        // SAFETY: sets libtorch's state of this thread.
        unsafe { psjobs_enter_autocast() };
        Self
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // SAFETY: as above, and on the same thread: the value does not leave `in_bf16`.
        unsafe { psjobs_leave_autocast() };
    }
}

/// Computes under autocast to bf16, on CPUs and GPUs: libtorch multiplies matrices and convolves in bf16, with copies of f32
/// parameters that it casts once, and leaves in f32 what needs it. Gradients of f32 parameters are f32. backward() of what was computed
/// takes the types that forward took; call it outside. Not to be nested.
pub fn in_bf16<T>(compute: impl FnOnce() -> T) -> T {
    let _autocast = Autocast::enter();
    compute()
}

/// Lets GPUs multiply matrices of f32, and convolve them, in TF32, or forbids it, in the whole process. Call it before anything
/// is computed.
pub fn allow_tf32(allowed: bool) {
    // SAFETY: sets flags of libtorch's, which it reads when it computes.
    unsafe { psjobs_allow_tf32(allowed) };
}

#[cfg(test)]
mod tests {
    use std::panic::{self, AssertUnwindSafe};

    use tch::nn::{self, Module as _};
    use tch::{Device, Kind, Tensor, no_grad};

    use super::*;
    use crate::train::flat::Flat;

    unsafe extern "C" {
        /// Returns whether GPUs convolve, or else multiply matrices, in TF32.
        fn psjobs_tf32_is_allowed(convolution: bool) -> bool;
    }

    fn values(shape: &[i64], scale: f64) -> Tensor {
        let count: i64 = shape.iter().product();
        Tensor::arange(count, (Kind::Float, Device::Cpu)).sin().reshape(shape) * scale
    }

    /// A layer of f32, and what it gives for eight examples.
    fn layer() -> (nn::VarStore, impl Fn() -> Tensor) {
        let store = nn::VarStore::new(Device::Cpu);
        let layer = nn::Linear {
            ws: store.root().var_copy("weight", &values(&[4, 16], 0.1)),
            bs: Some(store.root().var_copy("bias", &values(&[4], 0.1))),
        };
        (store, move || layer.forward(&values(&[8, 16], 1.0)))
    }

    fn loss(output: &Tensor) -> Tensor {
        output.to_kind(Kind::Float).square().mean(Kind::Float)
    }

    #[test]
    fn layers_compute_in_bf16_and_their_parameters_get_f32_gradients() {
        let (store, forward) = layer();
        let exact = forward();
        assert_eq!(exact.kind(), Kind::Float);
        let output = in_bf16(&forward);
        assert_eq!(output.kind(), Kind::BFloat16);
        assert!((loss(&output).double_value(&[]) - loss(&exact).double_value(&[])).abs() < 2e-2);
        let flat = Flat::of(&store);
        let want = flat.gradients(&loss(&exact)).expect("computes");
        let found = flat.gradients(&loss(&output)).expect("computes");
        for (want, found) in want.iter().zip(&found) {
            assert_eq!(found.kind(), Kind::Float);
            assert!((found - want).abs().max().double_value(&[]) < 2e-2);
        }
        assert_eq!(forward().kind(), Kind::Float, "autocast has ended");
    }

    #[test]
    fn parameters_that_changed_are_cast_again() {
        let (store, forward) = layer();
        let before = in_bf16(&forward);
        no_grad(|| {
            for parameter in &mut store.trainable_variables() {
                let _ = parameter.zero_();
            }
        });
        assert!(loss(&before).double_value(&[]) > 0.0);
        assert_eq!(loss(&in_bf16(&forward)).double_value(&[]), 0.0);
    }

    #[test]
    fn a_panic_ends_autocast() {
        let (_store, forward) = layer();
        assert!(panic::catch_unwind(AssertUnwindSafe(|| in_bf16(|| -> Tensor { panic!("as asked") }))).is_err());
        assert_eq!(forward().kind(), Kind::Float);
    }

    #[test]
    fn a_gpu_multiplies_in_tf32_where_the_job_says_so() {
        // SAFETY: reads a flag.
        let allowed = || [false, true].map(|convolution| unsafe { psjobs_tf32_is_allowed(convolution) });
        assert_eq!(allowed(), [false, true], "as libtorch has it");
        for want in [true, false] {
            allow_tf32(want);
            assert_eq!(allowed(), [want; 2]);
        }
    }
}
