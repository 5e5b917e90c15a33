//! Gradients into buckets: those that a backward pass gives first are on their way to the other trainers
//! while it computes the next ones. Small tensors share a bucket, as each costs one pass through the ring.

use tch::Tensor;

use super::{Ring, RingError};

/// Elements of a bucket: 1 MiB. A smaller one costs more passes, a larger one begins later.
pub const BUCKET: usize = 256 * 1024;

/// Fills buckets and hands them to a ring; one for each backward pass.
pub struct Buckets<'a> {
    ring: &'a mut Ring,
    /// Elements that send a bucket off.
    full: usize,
    filling: Vec<f32>,
    sent: usize,
}

impl<'a> Buckets<'a> {
    #[must_use]
    pub fn new(ring: &'a mut Ring, full: usize) -> Self {
        Self { ring, full, filling: Vec::new(), sent: 0 }
    }

    /// The gradients that the backward pass has come to, each of the number of elements beside it; an
    /// undefined one is zeros.
    pub fn add(&mut self, gradients: &[(Tensor, usize)]) {
        for (gradient, elements) in gradients {
            let start = self.filling.len();
            self.filling.resize(start + elements, 0.0);
            if gradient.defined() {
                gradient.copy_data(&mut self.filling[start..], *elements);
            }
            if self.filling.len() >= self.full {
                self.send();
            }
        }
    }

    /// The backward pass is over: the mean of every gradient over the trainers, in the order of
    /// [`Buckets::add`], one behind the other.
    ///
    /// # Errors
    /// If a trainer is lost, or the wait is interrupted.
    pub fn mean(mut self) -> Result<Vec<f32>, RingError> {
        self.send();
        let trainers = self.ring.place().size as f32;
        let mut all = Vec::new();
        for _ in 0..self.sent {
            all.append(&mut self.ring.summed()?);
        }
        if trainers > 1.0 {
            all.iter_mut().for_each(|value| *value /= trainers);
        }
        Ok(all)
    }

    fn send(&mut self) {
        if !self.filling.is_empty() {
            self.ring.begin_sum(std::mem::take(&mut self.filling));
            self.sent += 1;
        }
    }
}
