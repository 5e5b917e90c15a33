//! Momentum of one trainer's own gradients, which the trainer keeps and adds to what it sends, with the look-ahead of Nesterov:
//! `v = momentum·v + g; u = g + momentum·v`. A server that subtracts `lr·u` moves the parameters as one that keeps a
//! momentum for each trainer, and sends each trainer the place to which all of these will carry them (DANA-Slim, Hakimi et
//! al., "Taming Momentum in a Distributed Asynchronous Environment", 2019, section 4). One momentum of all trainers' gradients
//! at the servers would act on parameters from before most of it, and diverge with few trainers.

use crate::simd;

/// Turns `gradient` into what the trainer sends, and brings `velocity` up to date. `decay` times the weights is added to the
/// gradient before, as `torch.optim.SGD` does; without decay the weights, a third of the memory, are not read.
///
/// # Panics
/// If the lengths differ.
pub fn look_ahead(gradient: &mut [f32], velocity: &mut [f32], weights: &[f32], momentum: f32, decay: f32) {
    #[inline(always)]
    fn decayed((gradient, velocity, weights, [momentum, decay]): (&mut [f32], &mut [f32], &[f32], [f32; 2])) {
        for ((g, v), w) in gradient.iter_mut().zip(velocity).zip(weights) {
            let decayed = *g + decay * *w;
            *v = momentum * *v + decayed;
            *g = decayed + momentum * *v;
        }
    }
    #[inline(always)]
    fn plain((gradient, velocity, momentum): (&mut [f32], &mut [f32], f32)) {
        for (g, v) in gradient.iter_mut().zip(velocity) {
            *v = momentum * *v + *g;
            *g += momentum * *v;
        }
    }
    assert!(gradient.len() == velocity.len() && gradient.len() == weights.len(), "one block");
    if decay == 0.0 {
        simd::run(plain, (gradient, velocity, momentum));
    } else {
        simd::run(decayed, (gradient, velocity, weights, [momentum, decay]));
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::training;

    use super::*;
    use crate::optimizer::Optimizer;

    /// With one trainer this is `torch.optim.SGD(nesterov=True)`, bit for bit.
    #[test]
    fn one_trainer_does_what_sgd_with_nesterov_does() {
        let n = 300;
        let gradient = |step: usize| (0..n).map(|i| ((i * 7 + step * 13) as f32).sin()).collect::<Vec<f32>>();
        for weight_decay in [0.01, 0.0] {
            let spec = training::Optimizer {
                learning_rate: 0.1,
                momentum: 0.9,
                weight_decay,
                nesterov: true,
                ..training::Optimizer::default()
            };
            let (whole, sends) = (Optimizer::new(&spec), Optimizer::descent(&spec));
            let (mut want, mut found) = (vec![1.0; n], vec![1.0; n]);
            let (mut state, mut none, mut velocity) = (whole.state(n), sends.state(n), vec![0.0; n]);
            for step in 0..5 {
                let mut gradient = gradient(step);
                whole.apply(&mut want, bytemuck::cast_slice(&gradient), &mut state, 0.5);
                look_ahead(&mut gradient, &mut velocity, &found, 0.9, weight_decay as f32);
                sends.apply(&mut found, bytemuck::cast_slice(&gradient), &mut none, 0.5);
            }
            assert_eq!((sends.slots(), found), (0, want), "weight decay {weight_decay}");
        }
    }
}
