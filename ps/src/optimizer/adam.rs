//! Adam (Kingma and Ba, ICLR 2015, algorithm 1) as `torch.optim.Adam` computes it: the gradient
//! carries the L2 weight decay, the root is corrected for its bias before eps is added.

use super::Rule;

/// Arguments, named as in `torch.optim.Adam`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the running mean of gradients.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients.
    pub beta2: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// L2 penalty.
    pub weight_decay: f64,
}

impl Rule for Adam {
    fn slots(&self) -> usize {
        2
    }

    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [Vec<f32>], rate: f64, step: u64) {
        let [mean, square] = slots else { unreachable!("Adam keeps two slots") };
        let correct = |beta: f64| 1.0 - beta.powf(step as f64);
        let factors = [
            self.weight_decay,
            self.beta1,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            rate / correct(self.beta1),
            1.0 / correct(self.beta2).sqrt(),
            self.epsilon,
        ];
        crate::simd::run(kernel, (weights, gradient, mean, square, factors.map(|v| v as f32)));
    }
}

type Arguments<'a> = (&'a mut [f32], &'a [[u8; 4]], &'a mut Vec<f32>, &'a mut Vec<f32>, [f32; 8]);

#[inline(always)]
fn kernel((weights, gradient, mean, square, [decay, b1, c1, b2, c2, rate, root, eps]): Arguments) {
    for (((w, g), m), v) in weights.iter_mut().zip(gradient).zip(mean).zip(square) {
        let g = f32::from_le_bytes(*g) + decay * *w;
        *m = b1 * *m + c1 * g;
        *v = b2 * *v + c2 * g * g;
        *w -= rate * *m / (v.sqrt() * root + eps);
    }
}
