//! Holds a model's parameters while it trains with servers. On the CPU they are views of the
//! session's memory: what the servers send is what the next forward reads. On a GPU they are views of
//! one tensor there, copied to and from the session's memory through a pinned buffer.

// Tensors that look at memory which libtorch does not own; each says why it is sound.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor, no_grad};

use super::flat::Flat;

/// A model's parameters, moved to where the servers' values arrive.
///
/// Dropping it gives the parameters memory of their own again, with their last values, so the model
/// outlives the session.
#[derive(Debug)]
pub struct ParameterBuffer {
    flat: Flat,
    home: Home,
}

#[derive(Debug)]
enum Home {
    /// Parameters are views of the session's memory.
    Session,
    /// Parameters are views of `mirror`, on the device; `staging` lies in host memory, pinned where possible.
    Device { mirror: Tensor, staging: Tensor },
}

impl ParameterBuffer {
    /// Moves the parameters of `flat`, which are on `device`, to the session's memory or a mirror of
    /// it. They take the values that are there.
    ///
    /// # Safety
    /// `session` must stay where it is and valid until the value returned is dropped. On the CPU it
    /// must not be written to while the model computes; gradients of a loss computed before are taken first.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub unsafe fn new(flat: Flat, device: Device, session: &[f32]) -> Self {
        assert_eq!(session.len(), flat.elements(), "elements of the session and of the model");
        // SAFETY: the caller's promise is this function's.
        let whole = unsafe { look_at(session) };
        if device == Device::Cpu {
            let mut buffer = Self { flat, home: Home::Session };
            buffer.place(&whole);
            return buffer;
        }
        let staging = Tensor::zeros_like(&whole).pin_memory(device);
        Self::mirrored(flat, device, staging, session)
    }

    /// Moves the parameters to one tensor on `device` and copies the session's values there.
    fn mirrored(flat: Flat, device: Device, staging: Tensor, session: &[f32]) -> Self {
        let mirror = Tensor::zeros([session.len() as i64], (Kind::Float, device));
        let mut buffer = Self { flat, home: Home::Device { mirror: mirror.shallow_clone(), staging } };
        buffer.place(&mirror);
        buffer.take(session);
        buffer
    }

    /// The gradient of `loss` by every parameter, into the session's memory.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn put_gradients(&mut self, loss: &Tensor, session: &mut [f32]) {
        assert_eq!(session.len(), self.flat.elements(), "elements of the session and of the model");
        let gradients = self.flat.gradients(loss);
        // SAFETY: the view ends with this function, before the borrow of `session` does.
        let mut session = unsafe { look_at(session) };
        match &mut self.home {
            Home::Session => gather(&self.flat, &gradients, &session),
            Home::Device { mirror, staging } => {
                let gathered = Tensor::empty_like(mirror);
                gather(&self.flat, &gradients, &gathered);
                staging.copy_(&gathered);
                session.copy_(staging);
            }
        }
    }

    /// Takes the parameters that arrived in the session's memory.
    pub fn take(&mut self, session: &[f32]) {
        if let Home::Device { mirror, staging } = &mut self.home {
            // SAFETY: the view ends with this block, before the borrow of `session` does.
            let session = unsafe { look_at(session) };
            staging.copy_(&session);
            // From pinned memory the copy is only queued: what computes with the parameters is queued behind it, and
            // so is the gradients' copy, which is waited for before `staging` is written again. Two calls in a row leave
            // the later one's values.
            let arrived = staging.to_device_(mirror.device(), Kind::Float, true, false);
            no_grad(|| mirror.copy_(&arrived));
        }
    }

    fn place(&mut self, whole: &Tensor) {
        no_grad(|| {
            for parameter in self.flat.parameters_mut() {
                let view = part(whole, parameter.range.start, &parameter.tensor);
                parameter.tensor.set_data(&view);
            }
        });
    }
}

impl Drop for ParameterBuffer {
    fn drop(&mut self) {
        no_grad(|| {
            for parameter in self.flat.parameters_mut() {
                let own = parameter.tensor.detach().copy();
                parameter.tensor.set_data(&own);
            }
        });
    }
}

/// Copies the gradients to their places in `whole`; zeros where the loss does not depend on a parameter.
fn gather(flat: &Flat, gradients: &[Tensor], whole: &Tensor) {
    for (parameter, gradient) in flat.parameters().iter().zip(gradients) {
        let mut place = part(whole, parameter.range.start, &parameter.tensor);
        if gradient.defined() {
            place.copy_(gradient);
        } else {
            let _ = place.zero_();
        }
    }
}

/// The elements of `whole` from `start` on, in the shape of `like`.
fn part(whole: &Tensor, start: usize, like: &Tensor) -> Tensor {
    whole.narrow(0, start as i64, like.numel() as i64).view_as(like)
}

/// A tensor that looks at `memory`.
///
/// # Safety
/// The tensor, and every view of it, must be gone or have other data before `memory` goes.
unsafe fn look_at(memory: &[f32]) -> Tensor {
    // SAFETY: pointer and length are of one allocation of f32, which the caller keeps.
    unsafe { Tensor::from_blob(memory.as_ptr().cast(), &[memory.len() as i64], &[], Kind::Float, Device::Cpu) }
}

#[cfg(test)]
mod tests {
    use tch::nn;

    use super::*;

    const LR: f32 = 0.01;

    /// Values that follow from the shape alone: tests run side by side and share libtorch's generator.
    fn values(shape: &[i64]) -> Tensor {
        let count: i64 = shape.iter().product();
        Tensor::arange(count, (Kind::Float, Device::Cpu)).sin().reshape(shape)
    }

    /// A small network, its parameters, and a loss to train on.
    fn network() -> (nn::VarStore, impl Fn() -> Tensor) {
        let store = nn::VarStore::new(Device::Cpu);
        let [hidden, bias, output] = [("hidden", &[4, 6][..]), ("bias", &[4]), ("output", &[2, 4])]
            .map(|(name, shape)| store.root().var_copy(name, &values(shape)));
        // Takes part in nothing: its gradient is undefined.
        let _ = store.root().zeros("unused", &[3]);
        let loss = move || {
            let hidden = values(&[8, 6]).linear(&hidden, Some(&bias)).tanh();
            hidden.linear::<Tensor>(&output, None).square().sum(Kind::Float)
        };
        (store, loss)
    }

    /// Ten steps of plain SGD on a session's memory; returns what is in it, and what the model holds
    /// after it has gone.
    fn train_in(home: impl FnOnce(Flat, &[f32]) -> ParameterBuffer) -> (Vec<f32>, Vec<f32>) {
        let (store, loss) = network();
        let mut parameters = Flat::of(&store).values();
        let mut gradients = vec![f32::NAN; parameters.len()];
        let mut buffer = home(Flat::of(&store), &parameters);
        for _ in 0..10 {
            buffer.put_gradients(&loss(), &mut gradients);
            parameters.iter_mut().zip(&gradients).for_each(|(p, g)| *p -= LR * g);
            buffer.take(&parameters);
        }
        drop(buffer);
        let trained = parameters.clone();
        parameters.fill(f32::NAN);
        (trained, Flat::of(&store).values())
    }

    /// Does ten steps on the model's own tensors.
    fn train_apart() -> Vec<f32> {
        let (store, loss) = network();
        let mut flat = Flat::of(&store);
        for _ in 0..10 {
            let gradients = flat.gradients(&loss());
            no_grad(|| {
                for (parameter, gradient) in flat.parameters_mut().iter_mut().zip(gradients) {
                    if gradient.defined() {
                        parameter.tensor -= gradient * f64::from(LR);
                    }
                }
            });
        }
        flat.values()
    }

    #[test]
    fn views_of_flat_memory_train_as_tensors_of_their_own() {
        // SAFETY: the buffer is dropped before the memory is.
        let (trained, kept) = train_in(|flat, memory| unsafe { ParameterBuffer::new(flat, Device::Cpu, memory) });
        assert_eq!(trained, train_apart());
        assert_eq!(kept, trained, "the model keeps the last values in memory of its own");
    }

    #[test]
    fn a_mirror_on_a_device_trains_as_tensors_of_their_own() {
        let mirrored = |flat, memory: &[f32]| {
            let staging = Tensor::zeros([memory.len() as i64], (Kind::Float, Device::Cpu));
            ParameterBuffer::mirrored(flat, Device::Cpu, staging, memory)
        };
        let (trained, kept) = train_in(mirrored);
        assert_eq!(trained, train_apart());
        assert_eq!(kept, trained);
    }

    #[test]
    fn the_flat_space_is_sorted_by_name() {
        let (store, _loss) = network();
        let flat = Flat::of(&store);
        let names: Vec<&str> = flat.parameters().iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["bias", "hidden", "output", "unused"]);
        assert_eq!(flat.elements(), 4 + 24 + 8 + 3);
        assert_eq!(flat.specs()[1].shape, [4, 6]);
    }
}
