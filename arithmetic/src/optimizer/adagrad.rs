//! Adagrad (Duchi et al., JMLR 2011) as `torch.optim.Adagrad` computes it: `sum += g²;
//! w -= lr / (1 + (t - 1)·lr_decay) · g / (√sum + eps)`, `g` with L2 weight decay.

use super::{Rule, Step};

/// Arguments, as in `torch.optim.Adagrad`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    /// The rate of update t, from 1, is divided by 1 + (t - 1) x this.
    pub learning_rate_decay: f64,
    /// Initial value of the sums of squares.
    pub initial_accumulator: f64,
    /// Added to the root.
    pub epsilon: f64,
}

impl Rule for Adagrad {
    fn slots(&self) -> usize {
        1
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step) {
        let [sum] = slots else { unreachable!("Adagrad keeps one slot") };
        if step.number == 1 {
            sum.fill(self.initial_accumulator as f32);
        }
        let rate = step.rate / (1.0 + (step.number - 1) as f64 * self.learning_rate_decay);
        let factors = [rate, step.weight_decay, self.epsilon].map(|v| v as f32);
        crate::simd::run(kernel, (weights, gradient, sum, factors));
    }
}

type Arguments<'a> = (&'a mut [f32], &'a [[u8; 4]], &'a mut [f32], [f32; 3]);

#[inline(always)]
fn kernel((weights, gradient, sum, [rate, decay, eps]): Arguments) {
    for ((w, g), sum) in weights.iter_mut().zip(gradient).zip(sum) {
        let g = f32::from_le_bytes(*g) + decay * *w;
        *sum += g * g;
        *w -= rate * g / (sum.sqrt() + eps);
    }
}
