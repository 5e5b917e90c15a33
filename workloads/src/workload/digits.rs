//! Classifying the images of MNIST or Fashion-MNIST, with any network from images to log-probabilities.

use std::fmt;

use tch::nn::{self, ModuleT};
use tch::{Kind, Reduction, Tensor};

use crate::data::mnist::{Examples, Mnist};
use crate::data::streamed_images::{Images, StreamedImages};
use psjobs_worker::device::evaluation_batch;
use psjobs_worker::{Metrics, Workload};

/// Examples that evaluation reads at once on a CPU: few enough that what lies between two layers stays in the
/// cache, which makes a difference of two.
const EVALUATION_BATCH: usize = 32;

/// Bytes of what the widest layer of the networks, the second convolution of [`ConvNet`](crate::model::convnet::ConvNet), gives for
/// one image.
const IMAGE_BYTES: usize = 64 * 24 * 24 * 4;

/// The network `M` on MNIST, with the negative log-likelihood as its loss.
pub struct Digits<M> {
    train: Images,
    test: Examples,
    build: fn(&nn::Path) -> M,
}

impl<M> Digits<M> {
    pub fn new(data: Mnist, build: fn(&nn::Path) -> M) -> Self {
        Self { train: Images::Whole(data.train), test: data.test, build }
    }

    /// On images that are read a piece at a time.
    pub fn streamed(train: StreamedImages, test: Examples, build: fn(&nn::Path) -> M) -> Self {
        Self { train: Images::Streamed(train), test, build }
    }
}

impl<M> fmt::Debug for Digits<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digits").field("train", &self.train).finish_non_exhaustive()
    }
}

impl<M: ModuleT> Workload for Digits<M> {
    type Model = M;
    type Data = Images;

    fn training_set(&self) -> Images {
        self.train.clone()
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
        let size = evaluation_batch(self.test.device(), EVALUATION_BATCH, IMAGE_BYTES);
        for (images, labels) in self.test.batches(size) {
            let output = model.forward_t(&images, false);
            right += output.argmax(-1, false).eq_tensor(&labels).sum(Kind::Float).double_value(&[]);
            loss += output.g_nll_loss::<Tensor>(&labels, None, Reduction::Sum, -100).double_value(&[]);
        }
        let count = self.test.len() as f64;
        Metrics::from([("accuracy".to_owned(), right / count), ("test_loss".to_owned(), loss / count)])
    }
}
