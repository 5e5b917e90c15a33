//! A workload's model to measure with values from elsewhere: a server's process does it while others train.

use psjobs_ps::client::TensorSpec;
use tch::{Device, nn, no_grad};

use super::flat::Flat;
use crate::workload::{Metrics, Workload};

/// The model of a workload, on the CPU.
pub struct Evaluator<'a, W: Workload> {
    workload: &'a W,
    model: W::Model,
    flat: Flat,
    buffers: Vec<String>,
}

impl<'a, W: Workload> Evaluator<'a, W> {
    /// Makes the model; its values are of no account.
    #[must_use]
    pub fn new(workload: &'a W) -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let model = workload.model(&store.root());
        let mut buffers: Vec<String> =
            store.variables().into_iter().filter(|(_, tensor)| !tensor.requires_grad()).map(|(name, _)| name).collect();
        buffers.sort_unstable();
        Self { workload, model, flat: Flat::of(&store), buffers }
    }

    /// Names and shapes of the parameters, in the order of the flat space.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.flat.specs()
    }

    /// Tensors that are no parameters, a batch norm's means for example: only trainers know their values.
    #[must_use]
    pub fn buffers(&self) -> &[String] {
        &self.buffers
    }

    /// The metrics with these parameters.
    ///
    /// # Panics
    /// If there are not as many as the model has.
    pub fn measure(&mut self, parameters: &[f32]) -> Metrics {
        self.flat.set(parameters);
        no_grad(|| self.workload.evaluate(&self.model))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::data::Dataset;

    struct NoExamples;

    impl Dataset for NoExamples {
        type Batch = ();

        fn examples(&self) -> usize {
            0
        }

        fn batch(&self, _examples: &[i64]) {}
    }

    /// Its metric is the weighted sum of its parameters.
    struct Sum;

    impl Workload for Sum {
        type Model = [Tensor; 2];
        type Data = NoExamples;

        fn training_set(&self) -> NoExamples {
            NoExamples
        }

        fn model(&self, path: &nn::Path) -> [Tensor; 2] {
            let _ = path.zeros_no_train("mean", &[4]);
            [path.zeros("b", &[1]), path.zeros("a", &[2])]
        }

        fn loss(&self, [b, _]: &[Tensor; 2], _batch: ()) -> Tensor {
            b.sum(Kind::Float)
        }

        fn evaluate(&self, [b, a]: &[Tensor; 2]) -> Metrics {
            let sum = b.sum(Kind::Float) * 100 + a.sum(Kind::Float);
            Metrics::from([("sum".to_owned(), sum.double_value(&[]))])
        }
    }

    #[test]
    fn a_model_is_measured_with_the_values_that_are_given() {
        let mut evaluator = Evaluator::new(&Sum);
        let names: Vec<_> = evaluator.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
        assert_eq!(names, [("b".to_owned(), vec![1]), ("a".to_owned(), vec![2])]);
        assert_eq!(evaluator.buffers(), ["mean"]);
        for (values, want) in [([1.0, 2.0, 3.0], 105.0), ([4.0, 0.0, 1.0], 401.0)] {
            assert_eq!(evaluator.measure(&values)["sum"], want);
        }
    }
}
