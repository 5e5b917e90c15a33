//! Adds up the gradients of a step's micro-batches, in tensors of their own.

use tch::{TchError, Tensor};

/// The gradients of the micro-batches of a step that were computed so far, by parameter; none at the beginning of a step.
#[derive(Debug, Default)]
pub struct GradientSum(Vec<Tensor>);

impl GradientSum {
    /// Adds the gradients of a micro-batch, undefined where its loss does not depend on a parameter.
    ///
    /// # Errors
    /// If libtorch has no memory for the sum.
    pub fn add(&mut self, gradients: Vec<Tensor>) -> Result<(), TchError> {
        self.0 = self.end(gradients)?;
        Ok(())
    }

    /// Returns the sum with the gradients of the last micro-batch, and begins another step.
    ///
    /// # Errors
    /// If libtorch has no memory for the sum.
    pub fn end(&mut self, last: Vec<Tensor>) -> Result<Vec<Tensor>, TchError> {
        if self.0.is_empty() {
            return Ok(last);
        }
        // Not in place: the gradients of two parameters may be one tensor.
        let pairs = std::mem::take(&mut self.0).into_iter().zip(last);
        pairs
            .map(|(sum, gradient)| match (sum.defined(), gradient.defined()) {
                (true, true) => sum.f_add(&gradient),
                (true, false) => Ok(sum),
                (false, _) => Ok(gradient),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_add_up_where_there_are_some_and_each_step_begins_anew() {
        let one = || Tensor::from(1.0_f32);
        let values = |gradients: Vec<Tensor>| -> Vec<Option<f64>> {
            gradients.iter().map(|gradient| gradient.defined().then(|| gradient.double_value(&[]))).collect()
        };
        let mut sum = GradientSum::default();
        for _ in 0..2 {
            sum.add(vec![one(), one(), Tensor::new(), Tensor::new()]).expect("adds");
            sum.add(vec![one(), Tensor::new(), Tensor::new(), Tensor::new()]).expect("adds");
            let ended = sum.end(vec![one(), Tensor::new(), one(), Tensor::new()]).expect("adds");
            assert_eq!(values(ended), [Some(3.0), Some(1.0), Some(1.0), None]);
        }
        assert_eq!(values(sum.end(vec![one()]).expect("adds")), [Some(1.0)], "a step of one batch");
    }
}
