//! A backward pass in stages, from the last to the first, so that the gradients of the last layers are
//! on their way while those of the first ones are computed. libtorch's bindings have no hooks: instead
//! the forward pass is cut into pieces whose gradients are asked for one by one. The results are the
//! same bits.

use tch::{Kind, Tensor};

/// The cuts of one forward pass.
#[derive(Debug)]
pub struct Tape {
    cuts: Vec<Cut>,
    active: bool,
}

/// A value on both sides of a cut.
#[derive(Debug)]
struct Cut {
    before: Tensor,
    after: Tensor,
}

impl Tape {
    /// A tape that cuts, or, where no process waits for the first gradients, one that does not.
    #[must_use]
    pub fn new(active: bool) -> Self {
        Self { cuts: Vec::new(), active }
    }

    /// Ends a stage with `value`; the next one goes on with what is returned.
    pub fn cut(&mut self, value: Tensor) -> Tensor {
        if !self.active {
            return value;
        }
        let after = value.detach().set_requires_grad(true);
        let next = after.shallow_clone();
        self.cuts.push(Cut { before: value, after });
        next
    }

    /// The gradients of `loss` by each stage's inputs, the last stage first; `take` gets the number of the
    /// stage and its gradients, undefined where the loss does not depend on one. Without cuts
    /// all come at once, when all are there.
    ///
    /// # Panics
    /// If the forward pass was not cut into as many stages.
    pub fn backward(self, loss: &Tensor, stages: &[Vec<Tensor>], mut take: impl FnMut(usize, Vec<Tensor>)) {
        if !self.active {
            let inputs: Vec<&Tensor> = stages.iter().flatten().collect();
            let mut gradients = Tensor::run_backward(&[loss], &inputs, false, false).into_iter();
            let by_stage: Vec<Vec<Tensor>> =
                stages.iter().map(|stage| gradients.by_ref().take(stage.len()).collect()).collect();
            by_stage.into_iter().enumerate().rev().for_each(|(stage, gradients)| take(stage, gradients));
            return;
        }
        assert_eq!(self.cuts.len() + 1, stages.len(), "cuts part the stages");
        let mut root = loss.shallow_clone();
        let mut cuts = self.cuts;
        for (number, stage) in stages.iter().enumerate().rev() {
            let cut = cuts.pop();
            let inputs: Vec<&Tensor> = stage.iter().chain(cut.as_ref().map(|cut| &cut.after)).collect();
            let mut gradients = Tensor::run_backward(&[&root], &inputs, false, false);
            if let Some(cut) = cut {
                let gradient = gradients.pop().expect("the cut was the last input");
                root = (cut.before * gradient).sum(Kind::Float);
            }
            take(number, gradients);
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn values(shape: &[i64], scale: f64) -> Tensor {
        let count: i64 = shape.iter().product();
        let values = (Tensor::arange(count, (Kind::Float, Device::Cpu)) * scale).sin().reshape(shape);
        values.set_requires_grad(true)
    }

    #[test]
    fn stages_give_the_bits_of_one_backward_pass_last_stage_first() {
        let (input, weights) = (values(&[16, 8], 0.3).detach(), [1.1, 1.7, 2.3].map(|scale| values(&[8, 8], scale)));
        let unused = values(&[2], 1.0);
        let run = |active| {
            let mut tape = Tape::new(active);
            let mut x = input.shallow_clone();
            for (i, weights) in weights.iter().enumerate() {
                x = x.matmul(weights).tanh();
                if i < 2 {
                    x = tape.cut(x);
                }
            }
            let mut stages: Vec<Vec<Tensor>> = weights.iter().map(|w| vec![w.shallow_clone()]).collect();
            stages[2].push(unused.shallow_clone());
            let mut order = Vec::new();
            let mut found = Vec::new();
            tape.backward(&x.square().sum(Kind::Float), &stages, |stage, gradients| {
                order.push(stage);
                for gradient in gradients {
                    found.push(gradient.defined().then(|| Vec::<f32>::try_from(gradient.flatten(0, -1)).expect("f32")));
                }
            });
            assert_eq!(order, [2, 1, 0]);
            found
        };
        let (cut, whole) = (run(true), run(false));
        assert_eq!(cut.len(), 4);
        assert!(cut == whole, "the bits differ");
        assert_eq!(cut[1], None, "the loss does not depend on it");
    }
}
