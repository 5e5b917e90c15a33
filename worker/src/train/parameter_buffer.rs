//! Holds a model's parameters while it trains with servers. On the CPU they are views of the
//! session's memory: what the servers send is what the next forward reads. On a GPU they are views of
//! one tensor there, copied to and from the session's memory, which is pinned.

// Tensors that look at memory which libtorch does not own; each says why it is sound.
#![allow(unsafe_code)]

use psjobs_ps::shm::Mapping;
use tch::{Device, Kind, TchError, Tensor, no_grad};

use super::completed_gradients::CompletedGradients;
use super::flat::Flat;
use super::gradient_hooks::GradientHooks;
use super::gradient_sum::GradientSum;
use super::pinned_memory::PinnedMemory;

/// Elements that are copied from a GPU at once, 8 MiB: servers get each piece while the next one is copied.
const PIECE: usize = 2 << 20;

/// A model's parameters, moved to where the servers' values arrive.
///
/// Dropping it gives the parameters memory of their own again, with their last values, so the model
/// outlives the session.
#[derive(Debug)]
pub struct ParameterBuffer {
    // Dropped in this order: tensors are gone before the memory they look at.
    flat: Flat,
    home: Home,
    /// Gradients of a step's micro-batches, where they are not added up in the session's memory.
    sum: GradientSum,
    memory: Mapping,
}

#[derive(Debug)]
enum Home {
    /// Parameters are views of the session's memory. Each gradient is copied to its place there when it is complete, or added to
    /// those of the step's micro-batches before: `has_sum` says where such are.
    Session { places: Vec<Tensor>, hooks: GradientHooks, completed: CompletedGradients, has_sum: Vec<bool> },
    /// Parameters are views of `mirror`, on the device. Gradients are copied to the session's memory `piece` elements
    /// at a time, and each piece leaves while the next one is copied; with `None` all leave together. The session's
    /// memory is pinned where the system allows it.
    Device { mirror: Tensor, piece: Option<usize>, _pinned: Option<PinnedMemory> },
}

impl ParameterBuffer {
    /// Moves the parameters of `flat`, which are on `device`, to the session's memory, which `memory` maps, or a mirror of
    /// it. They take the values that are there. Gradients leave in blocks of `block_elements`.
    ///
    /// # Safety
    /// A view of a parameter must not outlive the value returned.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub unsafe fn new(flat: Flat, device: Device, mut memory: Mapping, block_elements: usize) -> Self {
        if device == Device::Cpu {
            // SAFETY: the places are dropped before the memory, and parameters get other data before.
            let (values, gradients) = unsafe { (look_at(memory.parameters_mut()), look_at(memory.gradients_mut())) };
            let parameters = flat.parameters();
            let places: Vec<Tensor> = parameters.iter().map(|p| part(&gradients, p.range.start, &p.tensor)).collect();
            let hooks = GradientHooks::new(parameters.iter().map(|p| p.tensor.shallow_clone()).collect());
            let completed = CompletedGradients::new(parameters.iter().map(|p| p.range.len()), block_elements);
            let has_sum = vec![false; places.len()];
            let home = Home::Session { places, hooks, completed, has_sum };
            let mut buffer = Self { flat, home, sum: GradientSum::default(), memory };
            buffer.place(&values);
            return buffer;
        }
        Self::apart(flat, device, memory)
    }

    /// As [`ParameterBuffer::new`], but the parameters are apart from the session's memory on every device: it may be written
    /// to while the model computes. [`ParameterBuffer::gradients`] and [`ParameterBuffer::put`] take the place of
    /// [`ParameterBuffer::put_gradients`] then.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn apart(flat: Flat, device: Device, memory: Mapping) -> Self {
        // SAFETY: the buffer unpins the memory before it drops it.
        let pinned = unsafe { PinnedMemory::pin(&memory, device) };
        // The CPU copies gradients to the session's memory at once: pieces would cost it a second copy.
        let piece = (device != Device::Cpu).then_some(PIECE);
        Self::mirrored(flat, device, memory, piece, pinned)
    }

    /// Moves the parameters to one tensor on `device` and copies the session's values there. Gradients leave `piece`
    /// elements at a time.
    fn mirrored(
        flat: Flat,
        device: Device,
        memory: Mapping,
        piece: Option<usize>,
        pinned: Option<PinnedMemory>,
    ) -> Self {
        let mirror = Tensor::zeros([memory.elements() as i64], (Kind::Float, device));
        let home = Home::Device { mirror: mirror.shallow_clone(), piece, _pinned: pinned };
        let mut buffer = Self { flat, home, sum: GradientSum::default(), memory };
        buffer.place(&mirror);
        buffer.take();
        buffer
    }

    /// Computes the gradient of `loss`, that of a micro-batch, and keeps it for the next [`ParameterBuffer::put_gradients`] or
    /// [`ParameterBuffer::gradients`]. None leaves: the others of the step are to be added.
    ///
    /// # Errors
    /// If libtorch cannot compute it.
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<(), TchError> {
        if let Home::Session { places, hooks, has_sum, .. } = &mut self.home {
            return hooks.backward(loss, &mut |index, gradient| {
                put_or_add(&mut places[index], &mut has_sum[index], &gradient);
            });
        }
        self.sum.add(self.flat.gradients(loss)?)
    }

    /// The gradient of `loss` by every parameter, with those that were accumulated, into the session's memory, the last first:
    /// `offer` gets the element from which on they are there. From the CPU they come while the others are computed, from a
    /// GPU piece by piece when all are.
    ///
    /// # Errors
    /// If libtorch cannot compute them.
    pub fn put_gradients(&mut self, loss: &Tensor, mut offer: impl FnMut(usize) + Send) -> Result<(), TchError> {
        if let Home::Session { places, hooks, completed, has_sum } = &mut self.home {
            completed.begin();
            hooks.backward(loss, &mut |index, gradient| {
                put_or_add(&mut places[index], &mut has_sum[index], &gradient);
                if let Some(first) = completed.add(index) {
                    offer(first);
                }
            })?;
            for index in completed.missing().filter(|index| !has_sum[*index]) {
                let _ = places[index].zero_();
            }
            has_sum.fill(false);
            return Ok(());
        }
        let gradients = self.gradients(loss)?;
        self.put(&gradients, offer);
        Ok(())
    }

    /// The gradient of `loss` by every parameter, with those that were accumulated, in tensors of its own; undefined where there
    /// is none. Of a buffer apart from the session's memory.
    ///
    /// # Errors
    /// If libtorch cannot compute them.
    pub fn gradients(&mut self, loss: &Tensor) -> Result<Vec<Tensor>, TchError> {
        self.sum.end(self.flat.gradients(loss)?)
    }

    /// Puts gradients into the session's memory, zero where one is undefined: from a device in pieces, the last first,
    /// and `offer` gets the element from which on they are there. All are when this returns.
    pub fn put(&mut self, gradients: &[Tensor], mut offer: impl FnMut(usize)) {
        let session = self.session_gradients();
        let Home::Device { mirror, piece: Some(elements), .. } = &self.home else {
            return gather(&self.flat, gradients, &session);
        };
        let gathered = Tensor::empty_like(mirror);
        gather(&self.flat, gradients, &gathered);
        let mut end = self.flat.elements();
        while end > 0 {
            let first = end.saturating_sub(*elements);
            let piece = |whole: &Tensor| whole.narrow(0, first as i64, (end - first) as i64);
            piece(&session).copy_(&piece(&gathered));
            if first > 0 {
                offer(first);
            }
            end = first;
        }
    }

    /// Offers no gradients while backward() computes others.
    pub fn offer_at_the_end(&mut self) {
        if let Home::Session { completed, .. } = &mut self.home {
            completed.offer_nothing();
        }
    }

    /// Takes the parameters that arrived in the session's memory.
    pub fn take(&mut self) {
        let values = self.values();
        if let Home::Device { mirror, .. } = &mut self.home {
            // From pinned memory the copy is only queued: what computes with the parameters is queued behind it, and
            // so is the gradients' copy, which is waited for before values of the next step arrive. Two calls in a row leave
            // the later one's values.
            let arrived = values.to_device_(mirror.device(), Kind::Float, true, false);
            no_grad(|| mirror.copy_(&arrived));
        }
    }

    /// The values in the session's memory. Only parameters may keep a view of them.
    fn values(&mut self) -> Tensor {
        // SAFETY: the memory stays where it is until this buffer is dropped, which gives parameters other data before.
        unsafe { look_at(self.memory.parameters_mut()) }
    }

    /// The gradients in the session's memory. Nothing but the places of this buffer may keep a view of them.
    fn session_gradients(&mut self) -> Tensor {
        // SAFETY: as above.
        unsafe { look_at(self.memory.gradients_mut()) }
    }

    fn place(&mut self, whole: &Tensor) {
        assert_eq!(self.memory.elements(), self.flat.elements(), "elements of the session and of the model");
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
        if let Home::Device { mirror, .. } = &self.home {
            // Waits for the copy that `take` has queued: it reads the memory that goes now.
            let _ = mirror.narrow(0, 0, 1).double_value(&[]);
        }
        no_grad(|| {
            for parameter in self.flat.parameters_mut() {
                let own = parameter.tensor.detach().copy();
                parameter.tensor.set_data(&own);
            }
        });
    }
}

/// Puts a gradient to its place, or adds it to the sum that is there.
fn put_or_add(place: &mut Tensor, has_sum: &mut bool, gradient: &Tensor) {
    if std::mem::replace(has_sum, true) {
        let _ = place.g_add_(gradient);
    } else {
        place.copy_(gradient);
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
unsafe fn look_at(memory: &mut [f32]) -> Tensor {
    // SAFETY: pointer and length are of one allocation of f32, which the caller keeps.
    unsafe { Tensor::from_blob(memory.as_mut_ptr().cast(), &[memory.len() as i64], &[], Kind::Float, Device::Cpu) }
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
        // Takes part in nothing: its gradient is undefined.
        let _ = store.root().zeros("unused", &[3]);
        let [hidden, bias, output] = [("hidden", &[4, 6][..]), ("bias", &[4]), ("output", &[2, 4])]
            .map(|(name, shape)| store.root().var_copy(name, &values(shape)));
        let loss = move || {
            let hidden = values(&[8, 6]).linear(&hidden, Some(&bias)).tanh();
            hidden.linear::<Tensor>(&output, None).square().sum(Kind::Float)
        };
        (store, loss)
    }

    /// Ten steps of plain SGD on a session's memory; returns what is in it, what the model holds after it has gone, and
    /// how often gradients could leave.
    fn train_in(home: impl FnOnce(Flat, Mapping) -> ParameterBuffer) -> (Vec<f32>, Vec<f32>, u32) {
        let (store, loss) = network();
        let initial = Flat::of(&store).values();
        let mut session = Mapping::new(initial.len()).expect("a memory file");
        session.parameters_mut().copy_from_slice(&initial);
        session.gradients_mut().fill(f32::NAN);
        let file = session.file().try_clone_to_owned().expect("a handle");
        let mut buffer = home(Flat::of(&store), Mapping::receive(file, initial.len()).expect("maps"));
        let mut offers = 0;
        for _ in 0..10 {
            let mut offered = initial.len();
            let put = buffer.put_gradients(&loss(), |first| {
                assert!(first > 0 && first < offered, "the last gradients come first, and what is left needs no offer");
                offered = first;
                offers += 1;
            });
            put.expect("computes");
            let gradients = session.gradients().to_vec();
            session.parameters_mut().iter_mut().zip(&gradients).for_each(|(p, g)| *p -= LR * g);
            buffer.take();
        }
        drop(buffer);
        let trained = session.parameters().to_vec();
        session.parameters_mut().fill(f32::NAN);
        (trained, Flat::of(&store).values(), offers)
    }

    /// Does ten steps on the model's own tensors.
    fn train_apart() -> Vec<f32> {
        let (store, loss) = network();
        let mut flat = Flat::of(&store);
        for _ in 0..10 {
            let gradients = flat.gradients(&loss()).expect("computes");
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
        // SAFETY: nothing keeps a view of a parameter.
        let in_session = |flat, memory| unsafe { ParameterBuffer::new(flat, Device::Cpu, memory, 8) };
        let (trained, kept, offers) = train_in(in_session);
        assert_eq!(offers, 20, "the output leaves first, then all but the block with the gradient that does not come");
        assert_eq!(trained, train_apart());
        assert_eq!(kept, trained, "the model keeps the last values in memory of its own");
    }

    #[test]
    fn parameters_apart_from_the_session_train_as_tensors_of_their_own() {
        let (trained, kept, _) = train_in(|flat, memory| ParameterBuffer::apart(flat, Device::Cpu, memory));
        assert_eq!(trained, train_apart());
        assert_eq!(kept, trained);
    }

    #[test]
    fn gradients_leave_in_pieces_the_last_first() {
        let in_pieces = |flat, memory| ParameterBuffer::mirrored(flat, Device::Cpu, memory, Some(8), None);
        let (trained, kept, offers) = train_in(in_pieces);
        assert_eq!(offers, 40, "each step has five pieces, and the last one to be copied needs no offer");
        assert_eq!(trained, train_apart());
        assert_eq!(kept, trained);

        for (piece, offered) in [(8, vec![31, 23, 15, 7]), (13, vec![26, 13]), (38, vec![1]), (39, vec![])] {
            let (store, _loss) = network();
            let flat = Flat::of(&store);
            let elements = flat.elements();
            let mut session = Mapping::new(elements).expect("a memory file");
            session.gradients_mut().fill(f32::NAN);
            let file = session.file().try_clone_to_owned().expect("a handle");
            let memory = Mapping::receive(file, elements).expect("maps");
            // The gradient of each element is its number, and that of the first parameter is undefined.
            let numbers = Tensor::arange(elements as i64, (Kind::Float, Device::Cpu));
            let parameters = flat.parameters();
            let mut gradients: Vec<Tensor> =
                parameters.iter().map(|p| part(&numbers, p.range.start, &p.tensor)).collect();
            gradients[0] = Tensor::new();
            let want: Vec<f32> = (0..elements).map(|number| if number < 3 { 0.0 } else { number as f32 }).collect();
            let mut buffer = ParameterBuffer::mirrored(flat, Device::Cpu, memory, Some(piece), None);
            let mut offers = Vec::new();
            buffer.put(&gradients, |first| {
                let arrived = session.gradients();
                assert_eq!(arrived[first..], want[first..], "pieces of {piece}: what is offered has arrived");
                assert!(arrived[..first].iter().all(|gradient| gradient.is_nan()), "pieces of {piece}: no others have");
                offers.push(first);
            });
            assert_eq!(offers, offered, "pieces of {piece}");
            assert_eq!(session.gradients(), want, "pieces of {piece}");
        }
    }

    #[test]
    fn values_that_arrive_apart_count_when_they_are_taken() {
        let (store, loss) = network();
        let initial = Flat::of(&store).values();
        let mut session = Mapping::new(initial.len()).expect("a memory file");
        session.parameters_mut().copy_from_slice(&initial);
        let file = session.file().try_clone_to_owned().expect("a handle");
        let memory = Mapping::receive(file, initial.len()).expect("maps");
        let mut buffer = ParameterBuffer::apart(Flat::of(&store), Device::Cpu, memory);
        // Another step's values arrive while this one is computed, and its gradients are still read.
        session.parameters_mut().fill(0.0);
        session.gradients_mut().fill(1.0);
        let gradients = buffer.gradients(&loss()).expect("computes");
        assert_eq!(Flat::of(&store).values(), initial);
        assert!(session.gradients().iter().all(|gradient| *gradient == 1.0));
        buffer.put(&gradients, |first| panic!("all of {first} leave together"));
        let gradient = session.gradients().to_vec();
        let (unused, used) = gradient.split_at(3);
        assert!(unused.iter().all(|gradient| *gradient == 0.0) && used.iter().any(|gradient| *gradient != 0.0));
        buffer.take();
        assert_eq!(Flat::of(&store).values(), vec![0.0; initial.len()]);
    }

    #[test]
    fn gradients_of_micro_batches_add_up_and_leave_with_the_last_one() {
        for in_session in [true, false] {
            let store = nn::VarStore::new(Device::Cpu);
            let _ = store.root().zeros("unused", &[3]);
            let [first, last] = ["first", "last"].map(|name| store.root().var_copy(name, &values(&[4])));
            let mut session = Mapping::new(11).expect("a memory file");
            session.gradients_mut().fill(f32::NAN);
            let file = session.file().try_clone_to_owned().expect("a handle");
            let (flat, memory) = (Flat::of(&store), Mapping::receive(file, 11).expect("maps"));
            let mut buffer = if in_session {
                // SAFETY: nothing keeps a view of a parameter.
                unsafe { ParameterBuffer::new(flat, Device::Cpu, memory, 4) }
            } else {
                ParameterBuffer::apart(flat, Device::Cpu, memory)
            };
            for step in 0..2 {
                buffer.accumulate(&(&first + &last * 2.0).sum(Kind::Float)).expect("computes");
                buffer.accumulate(&(&last * 3.0).sum(Kind::Float)).expect("computes");
                let mut offers = Vec::new();
                buffer.put_gradients(&(&last * 4.0).sum(Kind::Float), |from| offers.push(from)).expect("computes");
                let want = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0];
                assert_eq!(session.gradients(), want, "step {step}");
                assert_eq!(offers, if in_session { vec![7] } else { vec![] }, "the sum of `last` is complete first");
            }
        }
    }

    #[test]
    fn the_flat_space_has_the_order_in_which_the_model_was_made() {
        let (store, _loss) = network();
        let flat = Flat::of(&store);
        let names: Vec<&str> = flat.parameters().iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["unused", "hidden", "bias", "output"]);
        assert_eq!(flat.elements(), 3 + 24 + 4 + 8);
        assert_eq!(flat.specs()[1].shape, [4, 6]);
    }
}
