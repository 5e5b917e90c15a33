//! Stochastic gradient descent as `torch.optim.SGD` defines it (dampening 0): `g += decay·w;
//! m = momentum·m + g (m = g in the first step); w -= lr·m`, or with Nesterov `w -= lr·(g + momentum·m)`.

use super::{Rule, Step};

/// Arguments, named as in `torch.optim.SGD`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// Share of the last update that is added to the next.
    pub momentum: f64,
    /// Look ahead along the momentum.
    pub nesterov: bool,
}

impl Rule for Sgd {
    fn slots(&self) -> usize {
        usize::from(self.momentum != 0.0)
    }

    // m starts from zeros, so the first step gives m = g without a case of its own.
    fn update(&self, weights: &mut [f32], gradient: &[[u8; 4]], slots: &mut [&mut [f32]], step: &Step) {
        let [rate, decay, momentum] = [step.rate, step.weight_decay, self.momentum].map(|v| v as f32);
        match slots.first_mut() {
            None => crate::simd::run(plain, (weights, gradient, [rate, decay])),
            Some(m) if self.nesterov => crate::simd::run(nesterov, (weights, gradient, m, [rate, decay, momentum])),
            Some(m) => crate::simd::run(heavy_ball, (weights, gradient, m, [rate, decay, momentum])),
        }
    }
}

#[inline(always)]
fn plain((weights, gradient, [rate, decay]): (&mut [f32], &[[u8; 4]], [f32; 2])) {
    for (w, g) in weights.iter_mut().zip(gradient) {
        let g = f32::from_le_bytes(*g) + decay * *w;
        *w -= rate * g;
    }
}

/// Weights, gradient, momentum, and rate, decay and share of the momentum.
type Arguments<'a> = (&'a mut [f32], &'a [[u8; 4]], &'a mut [f32], [f32; 3]);

#[inline(always)]
fn heavy_ball((weights, gradient, m, [rate, decay, momentum]): Arguments) {
    for ((w, g), m) in weights.iter_mut().zip(gradient).zip(m) {
        let g = f32::from_le_bytes(*g) + decay * *w;
        *m = momentum * *m + g;
        *w -= rate * *m;
    }
}

#[inline(always)]
fn nesterov((weights, gradient, m, [rate, decay, momentum]): Arguments) {
    for ((w, g), m) in weights.iter_mut().zip(gradient).zip(m) {
        let g = f32::from_le_bytes(*g) + decay * *w;
        *m = momentum * *m + g;
        *w -= rate * (g + momentum * *m);
    }
}
