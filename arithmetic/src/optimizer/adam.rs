//! Adam (Kingma and Ba, ICLR 2015, algorithm 1) as `torch.optim.Adam` computes it: the gradient
//! carries the L2 weight decay, the root is corrected for its bias before eps is added. AdamW
//! (Loshchilov and Hutter, ICLR 2019): the weights decay by themselves, `w *= 1 - lr·decay`.
//! AMSGrad (Reddi et al., ICLR 2018): the root is of the largest mean of squares so far.

use super::{Rule, Step};

/// Arguments, named as in `torch.optim.Adam`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the running mean of gradients.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients.
    pub beta2: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// AdamW: decay the weights and not through the gradient.
    pub decoupled: bool,
    /// Remember the largest mean of squares.
    pub amsgrad: bool,
}

impl Rule for Adam {
    fn slots(&self) -> usize {
        2 + usize::from(self.amsgrad)
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step) {
        let &Step { number, rate, weight_decay } = step;
        let correct = |beta: f64| 1.0 - beta.powf(number as f64);
        let (penalty, keep) = if self.decoupled { (0.0, 1.0 - rate * weight_decay) } else { (weight_decay, 1.0) };
        let factors = [
            penalty,
            keep,
            self.beta1,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            rate / correct(self.beta1),
            1.0 / correct(self.beta2).sqrt(),
            self.epsilon,
        ]
        .map(|v| v as f32);
        match slots {
            [mean, square] => crate::simd::run(plain, (weights, gradient, mean, square, factors)),
            [mean, square, largest] => {
                crate::simd::run(amsgrad, (weights, gradient, mean, (square, largest), factors));
            }
            _ => unreachable!("Adam keeps two or three slots"),
        }
    }
}

type Arguments<'a, S> = (&'a mut [f32], &'a [[u8; 4]], &'a mut [f32], S, [f32; 9]);

#[inline(always)]
fn plain((weights, gradient, mean, square, factors): Arguments<&mut [f32]>) {
    let [penalty, keep, b1, c1, b2, c2, rate, root, eps] = factors;
    for (((w, g), m), v) in weights.iter_mut().zip(gradient).zip(mean).zip(square) {
        let g = f32::from_le_bytes(*g) + penalty * *w;
        *m = b1 * *m + c1 * g;
        *v = b2 * *v + c2 * g * g;
        *w = keep * *w - rate * *m / (v.sqrt() * root + eps);
    }
}

#[inline(always)]
fn amsgrad((weights, gradient, mean, (square, largest), factors): Arguments<(&mut [f32], &mut [f32])>) {
    let [penalty, keep, b1, c1, b2, c2, rate, root, eps] = factors;
    for ((((w, g), m), v), largest) in weights.iter_mut().zip(gradient).zip(mean).zip(square).zip(largest) {
        let g = f32::from_le_bytes(*g) + penalty * *w;
        *m = b1 * *m + c1 * g;
        *v = b2 * *v + c2 * g * g;
        *largest = largest.max(*v);
        *w = keep * *w - rate * *m / (largest.sqrt() * root + eps);
    }
}
