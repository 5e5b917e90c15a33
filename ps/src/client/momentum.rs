//! The momentum that a trainer keeps of its own gradients where the servers ask it to (`JoinReply.trainer_momentum`); its
//! formula is in [`psjobs_arithmetic::momentum`].

use std::ops::Range;

use psjobs_arithmetic::momentum::look_ahead;
use psjobs_arithmetic::parameter_group::{Stretch, within};
use psjobs_arithmetic::sums::all_finite;

use crate::layout::{Layout, TensorSpec};
use crate::parameter_group::stretches;
use crate::proto;

/// The momentum of all blocks. It begins at 0 when a trainer joins or goes back to a checkpoint.
pub struct Momentum {
    settings: proto::TrainerMomentum,
    stretches: Vec<Stretch>,
    velocity: Vec<f32>,
    /// The step of the newest gradient of each block that `velocity` contains.
    newest: Vec<Option<u64>>,
}

impl Momentum {
    /// Creates the momentum of a model's `tensors`.
    #[must_use]
    pub fn new(settings: proto::TrainerMomentum, tensors: &[TensorSpec], layout: &Layout) -> Self {
        let (velocity, newest) = (vec![0.0; layout.elements()], vec![None; layout.blocks() as usize]);
        Self { settings, stretches: stretches(tensors), velocity, newest }
    }

    /// Turns the gradient of a block, at `range` of the flat space, into what is sent; once, although a broken stream may make it
    /// leave again. A gradient with NaN or infinity stays as it is, and is not added: the servers decide about it.
    pub fn add(&mut self, step: u64, block: u32, range: Range<usize>, gradients: &mut [f32], parameters: &[f32]) {
        let newest = &mut self.newest[block as usize];
        if newest.replace(step) == Some(step) || !all_finite(bytemuck::cast_slice(&gradients[range.clone()])) {
            return;
        }
        for Stretch { range: part, group } in within(&self.stretches, &range) {
            let part = range.start + part.start..range.start + part.end;
            let decay = group.weight_decay.unwrap_or(self.settings.weight_decay) as f32;
            let (gradient, velocity) = (&mut gradients[part.clone()], &mut self.velocity[part.clone()]);
            look_ahead(gradient, velocity, &parameters[part], self.settings.momentum as f32, decay);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use psjobs_arithmetic::parameter_group::ParameterGroup;

    fn tensor(name: &str, weight_decay: Option<f64>) -> TensorSpec {
        let group = ParameterGroup { weight_decay, ..ParameterGroup::default() };
        TensorSpec { group, ..TensorSpec::new(name, vec![2]) }
    }

    fn add(momentum: &mut Momentum, step: u64, gradient: [f32; 4]) -> [f32; 4] {
        let mut gradients = gradient;
        momentum.add(step, 0, 0..4, &mut gradients, &[1.0, 1.0, 2.0, 2.0]);
        gradients
    }

    #[test]
    fn a_gradient_counts_once_with_the_decay_of_its_group_and_never_with_nan() {
        let tensors = [tensor("a", None), tensor("b", Some(0.25))];
        let layout = Layout::new(&tensors, 1).expect("fits");
        let settings = proto::TrainerMomentum { momentum: 0.5, weight_decay: 0.5 };
        let mut momentum = Momentum::new(settings, &tensors, &layout);
        // g + decay w is 1.5 in both tensors; the velocity is that; u = g + m v.
        let sent = add(&mut momentum, 0, [1.0; 4]);
        assert_eq!(sent, [2.25; 4]);
        assert_eq!(add(&mut momentum, 0, sent), sent, "sent again after a broken stream");
        let bad = add(&mut momentum, 1, [f32::NAN, 1.0, 1.0, 1.0]);
        assert!(bad[0].is_nan() && bad[1..] == [1.0; 3], "{bad:?}");
        // v = 0.5 * 1.5 + 1.5 = 2.25
        assert_eq!(add(&mut momentum, 2, [1.0; 4]), [2.625; 4]);
    }
}
