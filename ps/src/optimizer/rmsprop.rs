//! RMSprop (Hinton, 2012) as `torch.optim.RMSprop` computes it: `mean2 = alpha·mean2 + (1 - alpha)·g²;
//! w -= lr · g / (√mean2 + eps)`, `g` with L2 weight decay. Centered: the root is of the estimated
//! variance, mean2 - mean². Momentum: the quotient goes through a running sum first.

use super::Rule;

/// Arguments, named as in `torch.optim.RMSprop`.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    /// Decay of the running means, 0 to 1.
    pub alpha: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Share of the last update that is added to the next.
    pub momentum: f64,
    /// Subtract the square of the mean gradient under the root.
    pub centered: bool,
}

/// Elements that pass through the stages of an update together, and stay in the first-level cache
/// meanwhile.
const TILE: usize = 512;

impl Rule for RmsProp {
    fn slots(&self) -> usize {
        1 + usize::from(self.centered) + usize::from(self.momentum != 0.0)
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [Vec<f32>], rate: f64, _step: u64) {
        let (squares, others) = slots.split_first_mut().expect("RMSprop keeps a slot at least");
        let (means, updates) = others.split_at_mut(usize::from(self.centered));
        let [means, updates] = [means, updates].map(|slot| slot.first_mut().map(Vec::as_mut_slice).unwrap_or_default());
        crate::simd::run(kernel, (self, weights, gradient, squares, means, updates, rate as f32));
    }
}

type Arguments<'a> = (&'a RmsProp, &'a mut [f32], &'a [[u8; 4]], &'a mut [f32], &'a mut [f32], &'a mut [f32], f32);

#[inline(always)]
fn kernel((args, weights, gradient, squares, means, updates, rate): Arguments) {
    let [alpha, fresh, eps, weight_decay, momentum] =
        [args.alpha, 1.0 - args.alpha, args.epsilon, args.weight_decay, args.momentum].map(|v| v as f32);
    let mut means = means.chunks_mut(TILE);
    let mut updates = updates.chunks_mut(TILE);
    let tiles = weights.chunks_mut(TILE).zip(gradient.chunks(TILE)).zip(squares.chunks_mut(TILE));
    for ((weights, gradient), squares) in tiles {
        let (mut direction, mut variance) = ([0.0; TILE], [0.0; TILE]);
        let (direction, variance) = (&mut direction[..weights.len()], &mut variance[..weights.len()]);
        let out = direction.iter_mut().zip(&mut *variance);
        for (((w, g), square), (d, v)) in weights.iter().zip(gradient).zip(squares).zip(out) {
            *d = f32::from_le_bytes(*g) + weight_decay * w;
            *square = alpha * *square + fresh * (*d * *d);
            *v = *square;
        }
        if let Some(means) = means.next() {
            for ((mean, d), v) in means.iter_mut().zip(&*direction).zip(&mut *variance) {
                *mean += fresh * (d - *mean);
                // Rounding can make the difference negative.
                *v = (*v - *mean * *mean).max(0.0);
            }
        }
        for (d, v) in direction.iter_mut().zip(variance) {
            *d /= v.sqrt() + eps;
        }
        if let Some(updates) = updates.next() {
            for (update, d) in updates.iter_mut().zip(&mut *direction) {
                *update = momentum * *update + *d;
                *d = *update;
            }
        }
        for (w, d) in weights.iter_mut().zip(direction) {
            *w -= rate * *d;
        }
    }
}
