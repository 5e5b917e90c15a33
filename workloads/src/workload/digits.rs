//! Classifying the images of MNIST or Fashion-MNIST, with any network from images to log-probabilities.

use std::fmt;

use tch::nn::{self, ModuleT};
use tch::{Kind, Reduction, Tensor};

use crate::data::mnist::{Examples, Mnist};
use psjobs_worker::{Metrics, Workload};

/// Examples that evaluation reads at once: few enough that what lies between two layers stays in the
/// cache, which makes a difference of two.
const EVALUATION_BATCH: usize = 32;

/// The network `M` on MNIST, with the negative log-likelihood as its loss.
pub struct Digits<M> {
    data: Mnist,
    build: fn(&nn::Path) -> M,
}

impl<M> Digits<M> {
    pub fn new(data: Mnist, build: fn(&nn::Path) -> M) -> Self {
        Self { data, build }
    }
}

impl<M> fmt::Debug for Digits<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digits").field("data", &self.data).finish_non_exhaustive()
    }
}

impl<M: ModuleT> Workload for Digits<M> {
    type Model = M;
    type Data = Examples;

    fn training_set(&self) -> Examples {
        self.data.train.clone()
    }

    fn model(&self, path: &nn::Path) -> M {
        (self.build)(path)
    }

    fn loss(&self, model: &M, (images, labels): (Tensor, Tensor)) -> Tensor {
        model.forward_t(&images, true).nll_loss(&labels)
    }

    /// `accuracy` and `test_loss`, the mean negative log-likelihood.
    fn evaluate(&self, model: &M) -> Metrics {
        let (mut right, mut loss) = (0.0, 0.0);
        for (images, labels) in self.data.test.batches(EVALUATION_BATCH) {
            let output = model.forward_t(&images, false);
            right += output.argmax(-1, false).eq_tensor(&labels).sum(Kind::Float).double_value(&[]);
            loss += output.g_nll_loss::<Tensor>(&labels, None, Reduction::Sum, -100).double_value(&[]);
        }
        let count = self.data.test.len() as f64;
        Metrics::from([("accuracy".to_owned(), right / count), ("test_loss".to_owned(), loss / count)])
    }
}
