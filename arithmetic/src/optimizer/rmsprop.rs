//! RMSprop (Hinton, 2012) as `torch.optim.RMSprop` computes it: `mean2 = alpha·mean2 + (1 - alpha)·g²;
//! w -= lr · g / (√mean2 + eps)`, `g` with L2 weight decay. Centered: the root is of the estimated
//! variance, mean2 - mean². Momentum: the quotient goes through a running sum first.

use super::{Rule, Step};

/// Arguments, named as in `torch.optim.RMSprop`.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    /// Decay of the running means, 0 to 1.
    pub alpha: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// Share of the last update that is added to the next.
    pub momentum: f64,
    /// Subtract the square of the mean gradient under the root.
    pub centered: bool,
}

impl Rule for RmsProp {
    fn slots(&self) -> usize {
        1 + usize::from(self.centered) + usize::from(self.momentum != 0.0)
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step) {
        let [alpha, fresh, eps, decay, momentum, rate] =
            [self.alpha, 1.0 - self.alpha, self.epsilon, step.weight_decay, self.momentum, step.rate].map(|v| v as f32);
        let factors = Factors { alpha, fresh, eps, decay, momentum, rate };
        // One loop for each choice of slots, so that each is vectorized whole.
        match slots {
            [square] => crate::simd::run(plain, (weights, gradient, square, factors)),
            [square, mean] if self.centered => {
                crate::simd::run(centered, (weights, gradient, (square, mean), factors));
            }
            [square, update] => crate::simd::run(heavy, (weights, gradient, (square, update), factors)),
            [square, mean, update] => {
                crate::simd::run(centered_heavy, (weights, gradient, (square, mean, update), factors));
            }
            _ => unreachable!("RMSprop keeps one to three slots"),
        }
    }
}

#[derive(Clone, Copy)]
struct Factors {
    alpha: f32,
    fresh: f32,
    eps: f32,
    decay: f32,
    momentum: f32,
    rate: f32,
}

impl Factors {
    #[inline(always)]
    fn gradient(self, weight: f32, gradient: [u8; 4]) -> f32 {
        f32::from_le_bytes(gradient) + self.decay * weight
    }

    #[inline(always)]
    fn mean_square(self, square: &mut f32, g: f32) -> f32 {
        *square = self.alpha * *square + self.fresh * (g * g);
        *square
    }

    #[inline(always)]
    fn variance(self, square: &mut f32, mean: &mut f32, g: f32) -> f32 {
        let square = self.mean_square(square, g);
        *mean += self.fresh * (g - *mean);
        // Rounding can make the difference negative.
        (square - *mean * *mean).max(0.0)
    }

    #[inline(always)]
    fn quotient(self, g: f32, variance: f32) -> f32 {
        g / (variance.sqrt() + self.eps)
    }

    #[inline(always)]
    fn gather(self, update: &mut f32, quotient: f32) -> f32 {
        *update = self.momentum * *update + quotient;
        *update
    }
}

type Slot<'a> = &'a mut [f32];
type Arguments<'a, S> = (&'a mut [f32], &'a [[u8; 4]], S, Factors);

#[inline(always)]
fn plain((weights, gradient, square, factors): Arguments<Slot>) {
    for ((w, g), square) in weights.iter_mut().zip(gradient).zip(square) {
        let g = factors.gradient(*w, *g);
        let square = factors.mean_square(square, g);
        *w -= factors.rate * factors.quotient(g, square);
    }
}

#[inline(always)]
fn centered((weights, gradient, (square, mean), factors): Arguments<(Slot, Slot)>) {
    for (((w, g), square), mean) in weights.iter_mut().zip(gradient).zip(square).zip(mean) {
        let g = factors.gradient(*w, *g);
        let variance = factors.variance(square, mean, g);
        *w -= factors.rate * factors.quotient(g, variance);
    }
}

#[inline(always)]
fn heavy((weights, gradient, (square, update), factors): Arguments<(Slot, Slot)>) {
    for (((w, g), square), update) in weights.iter_mut().zip(gradient).zip(square).zip(update) {
        let g = factors.gradient(*w, *g);
        let square = factors.mean_square(square, g);
        *w -= factors.rate * factors.gather(update, factors.quotient(g, square));
    }
}

#[inline(always)]
fn centered_heavy((weights, gradient, (square, mean, update), factors): Arguments<(Slot, Slot, Slot)>) {
    for ((((w, g), square), mean), update) in weights.iter_mut().zip(gradient).zip(square).zip(mean).zip(update) {
        let g = factors.gradient(*w, *g);
        let variance = factors.variance(square, mean, g);
        *w -= factors.rate * factors.gather(update, factors.quotient(g, variance));
    }
}
