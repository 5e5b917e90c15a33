//! FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
//! algorithm 1). Per coordinate, with n the sum of squared gradients, 1/eta = (beta + √n) / alpha
//! and eta' that of the step before: `z += g - (1/eta - 1/eta')·w; w = 0 if |z| <= l1, else
//! -(z - sign(z)·l1) / (1/eta + l2)`. alpha is the learning rate; L1 gives exact zeros.
//!
//! The last line, solved for z, says that `z - clamp(z) = -(1/eta' + l2)·w`, with clamp to -l1..l1.
//! So z itself need not be kept, only its clamp c: `z = c + g - (1/eta + l2)·w` is the same, and has
//! no eta' in it. Thus a rate that changes from step to step does not rescale what was learned, and
//! initial weights other than the paper's zeros are kept: they are their own evidence.

use super::{Rule, Step};

/// Arguments, named as in the paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Ftrl {
    /// Lowers the rate of coordinates with few gradients; above 0.
    pub beta: f64,
    /// L1 penalty: a weight with less evidence is exactly 0.
    pub l1: f64,
    /// L2 penalty.
    pub l2: f64,
}

impl Rule for Ftrl {
    fn slots(&self) -> usize {
        2
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step) {
        let [squares, clamped] = slots else { unreachable!("FTRL keeps two slots") };
        if step.rate == 0.0 {
            return; // 1/eta is infinite: the weights cannot move.
        }
        let l1 = self.l1 as f32;
        if step.number == 1 {
            // A weight other than 0 has more than l1 of evidence.
            for (c, w) in clamped.iter_mut().zip(&*weights) {
                *c = if *w == 0.0 { 0.0 } else { -l1.copysign(*w) };
            }
        }
        let factors = [1.0 / step.rate, self.beta, self.l2].map(|v| v as f32);
        crate::simd::run(kernel, (weights, gradient, squares, clamped, l1, factors));
    }
}

type Arguments<'a> = (&'a mut [f32], &'a [[u8; 4]], &'a mut [f32], &'a mut [f32], f32, [f32; 3]);

#[inline(always)]
fn kernel((weights, gradient, squares, clamped, l1, [inverse_rate, beta, l2]): Arguments) {
    for (((w, g), n), c) in weights.iter_mut().zip(gradient).zip(squares).zip(clamped) {
        let g = f32::from_le_bytes(*g);
        *n += g * g;
        let strength = (beta + n.sqrt()) * inverse_rate + l2;
        let evidence = *c + g - strength * *w;
        let next = evidence.max(-l1).min(l1);
        // The paper's quotient, as a difference to w: that rounds less.
        let moved = *w - (*c + g - next) / strength;
        *w = if evidence == next { 0.0 } else { moved };
        *c = next;
    }
}
