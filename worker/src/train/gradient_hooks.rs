//! Hands over the gradient of each parameter as soon as backward() has completed it, while those of the layers before it are
//! still computed. libtorch calls hooks for that (`torch::autograd::PostAccumulateGradHook`), which `gradient_hooks.cpp` sets.

// The hooks are C++, and hold a pointer to this side; each call says why it is sound.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{TchError, Tensor};

/// Gets the number of a parameter and its gradient, on a thread of libtorch's.
type Take<'a> = dyn FnMut(usize, Tensor) + Send + 'a;

/// Hooks on the parameters of a model, until this is dropped.
pub struct GradientHooks {
    parameters: Vec<Tensor>,
    /// The hooks have its address.
    receiver: Box<Receiver>,
}

/// The state that the hooks reach.
struct Receiver(Mutex<State>);

struct State {
    /// Takes the gradients, while [`GradientHooks::backward`] runs.
    take: Option<Taker>,
    /// The panic of `take`, which must not pass through libtorch.
    panic: Option<Box<dyn Any + Send>>,
    /// The workload may have called backward() itself, and parameters keep its gradients.
    has_others: bool,
}

struct Taker(*mut Take<'static>);

// SAFETY: the pointer is to a value that is `Send`, and is used by one thread at a time, which holds the lock.
unsafe impl Send for Taker {}

unsafe extern "C" {
    /// Makes backward() call `take` each time when it has added to the gradient of `parameter`.
    fn psjobs_set_gradient_hook(
        parameter: *const c_void,
        take: unsafe extern "C" fn(*mut c_void, usize, *mut c_void) -> bool,
        context: *mut c_void,
        index: usize,
    );

    /// Removes the hook of `parameter`.
    fn psjobs_clear_gradient_hook(parameter: *const c_void);
}

impl GradientHooks {
    /// Sets a hook on each of `parameters`, which are the model's own tensors.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>) -> Self {
        let state = State { take: None, panic: None, has_others: true };
        let receiver = Box::new(Receiver(Mutex::new(state)));
        let context = (&raw const *receiver).cast_mut().cast();
        for (index, parameter) in parameters.iter().enumerate() {
            // SAFETY: the tensor lives, and `drop` removes the hook before the receiver goes.
            unsafe { psjobs_set_gradient_hook(parameter.as_ptr().cast(), take, context, index) };
        }
        Self { parameters, receiver }
    }

    /// Computes the gradient of `loss` by every parameter. `take` gets the number and the gradient of each that it depends
    /// on, in the order in which they are completed. What it does then must not need the parameters' gradients.
    ///
    /// # Errors
    /// If libtorch cannot compute them.
    ///
    /// # Panics
    /// If `take` panics; it gets no further gradient then.
    pub fn backward(&mut self, loss: &Tensor, take: &mut Take<'_>) -> Result<(), TchError> {
        // SAFETY: only the lifetime changes. The pointer is gone when this function returns, and backward() has returned
        // from all hooks before.
        let taker = unsafe { std::mem::transmute::<*mut Take<'_>, *mut Take<'static>>(take) };
        if std::mem::take(&mut self.receiver.lock().has_others) {
            self.parameters.iter_mut().for_each(Tensor::zero_grad);
        }
        self.receiver.lock().take = Some(Taker(taker));
        let outcome = loss.f_backward();
        let mut state = self.receiver.lock();
        state.take = None;
        let panic = state.panic.take();
        drop(state);
        match panic {
            Some(panic) => panic::resume_unwind(panic),
            None => outcome,
        }
    }
}

impl Drop for GradientHooks {
    fn drop(&mut self) {
        for parameter in &self.parameters {
            // SAFETY: the tensor lives, and no backward() runs: it would borrow this value.
            unsafe { psjobs_clear_gradient_hook(parameter.as_ptr().cast()) };
        }
    }
}

impl fmt::Debug for GradientHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientHooks").field("parameters", &self.parameters.len()).finish_non_exhaustive()
    }
}

impl Receiver {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Called by a hook with the gradient of a parameter. Returns true if it was taken.
///
/// # Safety
/// `context` is a [`Receiver`], and `gradient` a tensor that nobody else frees.
unsafe extern "C" fn take(context: *mut c_void, index: usize, gradient: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let (receiver, gradient) = unsafe { (&*context.cast::<Receiver>(), Tensor::from_ptr(gradient.cast())) };
    let mut state = receiver.lock();
    if state.panic.is_some() {
        return true;
    }
    let Some(taker) = &state.take else {
        state.has_others = true;
        return false;
    };
    let taker = taker.0;
    // SAFETY: `backward` keeps the value until its pointer is gone, and the lock keeps other threads out.
    let taken = panic::catch_unwind(AssertUnwindSafe(|| unsafe { (*taker)(index, gradient) }));
    state.panic = taken.err();
    true
}

#[cfg(test)]
mod tests {
    use tch::{Device, nn};

    use super::*;

    /// A chain of three factors, and the loss by it.
    fn chain() -> (Vec<Tensor>, impl Fn() -> Tensor) {
        let store = nn::VarStore::new(Device::Cpu);
        let factors: Vec<Tensor> = ["a", "b", "c"]
            .iter()
            .zip(2..)
            .map(|(name, value)| store.root().var_copy(name, &Tensor::from(value as f32)))
            .collect();
        let own = factors.iter().map(Tensor::shallow_clone).collect();
        (own, move || (&factors[0] * 10.0) * &factors[1] * &factors[2])
    }

    fn gradients(hooks: &mut GradientHooks, loss: &Tensor) -> Vec<(usize, f64)> {
        let mut taken = Vec::new();
        hooks.backward(loss, &mut |index, gradient| taken.push((index, gradient.double_value(&[])))).expect("computes");
        taken
    }

    #[test]
    fn gradients_come_from_the_last_to_the_first() {
        let (factors, loss) = chain();
        let mut hooks = GradientHooks::new(factors.iter().map(Tensor::shallow_clone).collect());
        for _ in 0..2 {
            assert_eq!(gradients(&mut hooks, &loss()), [(2, 60.0), (1, 80.0), (0, 120.0)]);
            assert!(factors.iter().all(|factor| !factor.grad().defined()), "a gradient that was taken is gone");
        }
    }

    #[test]
    fn gradients_of_another_backward_stay_out() {
        let (factors, loss) = chain();
        loss().backward();
        let mut hooks = GradientHooks::new(factors.iter().map(Tensor::shallow_clone).collect());
        assert_eq!(gradients(&mut hooks, &loss()), [(2, 60.0), (1, 80.0), (0, 120.0)], "from before there were hooks");
        loss().backward();
        assert_eq!(factors[0].grad().double_value(&[]), 120.0);
        assert_eq!(gradients(&mut hooks, &loss()), [(2, 60.0), (1, 80.0), (0, 120.0)], "from between two steps");
    }

    #[test]
    fn a_panic_comes_out_of_backward() {
        let (factors, loss) = chain();
        let mut hooks = GradientHooks::new(factors);
        let panicked =
            panic::catch_unwind(AssertUnwindSafe(|| hooks.backward(&loss(), &mut |_, _| panic!("as asked"))));
        assert!(panicked.is_err());
        assert_eq!(gradients(&mut hooks, &loss()).len(), 3, "and the next one works");
    }

    #[test]
    fn an_error_of_libtorch_is_returned() {
        let (factors, _) = chain();
        let mut hooks = GradientHooks::new(factors);
        assert!(hooks.backward(&Tensor::from(1.0_f32), &mut |_, _| ()).is_err(), "a constant has no gradient");
    }

    #[test]
    fn parameters_outlive_their_hooks() {
        let (factors, loss) = chain();
        drop(GradientHooks::new(factors.iter().map(Tensor::shallow_clone).collect()));
        loss().backward();
        assert_eq!(factors[2].grad().double_value(&[]), 60.0);
    }
}
