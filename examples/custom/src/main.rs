//! A workload of one's own: which piece of clothing is it? 60,000 images of Fashion-MNIST, a network with
//! two convolutions, and the pictures mirrored at random while it trains.

use std::process::ExitCode;

use psjobs_worker::data::Dataset;
use psjobs_worker::tch::nn::{self, ModuleT};
use psjobs_worker::tch::{Kind, Tensor};
use psjobs_worker::{Metrics, Source, Workload};
use psjobs_workloads::data::mnist;

struct Clothes {
    data: mnist::Mnist,
}

impl Clothes {
    fn open(source: &Source) -> anyhow::Result<Self> {
        let folder = mnist::Set::Fashion.folder(source.data.as_deref())?;
        Ok(Self { data: mnist::Mnist::open_set(mnist::Set::Fashion, &folder, source.device)? })
    }
}

/// The training set. `batch` runs on a thread of its own, ahead of the trainer.
struct Mirrored(mnist::Examples);

impl Dataset for Mirrored {
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.0.len()
    }

    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        let (images, labels) = self.0.select(examples);
        let mirrored = examples.iter().sum::<i64>() % 2 == 0;
        (if mirrored { images.flip([3]) } else { images }, labels)
    }
}

impl Workload for Clothes {
    type Model = nn::SequentialT;
    type Data = Mirrored;

    fn training_set(&self) -> Mirrored {
        Mirrored(self.data.train.clone())
    }

    fn model(&self, path: &nn::Path) -> nn::SequentialT {
        nn::seq_t()
            .add(nn::conv2d(path / "conv1", 1, 16, 3, Default::default()))
            .add_fn(|x| x.relu().max_pool2d_default(2))
            .add(nn::conv2d(path / "conv2", 16, 32, 3, Default::default()))
            .add_fn(|x| x.relu().max_pool2d_default(2).flatten(1, -1))
            .add_fn_t(|x, train| x.dropout(0.2, train))
            .add(nn::linear(path / "output", 32 * 5 * 5, 10, Default::default()))
    }

    fn loss(&self, model: &nn::SequentialT, (images, labels): (Tensor, Tensor)) -> Tensor {
        model.forward_t(&images, true).cross_entropy_for_logits(&labels)
    }

    fn evaluate(&self, model: &nn::SequentialT) -> Metrics {
        let right = self.data.test.batches(256).map(|(images, labels)| {
            let guess = model.forward_t(&images, false).argmax(-1, false);
            guess.eq_tensor(&labels).sum(Kind::Float).double_value(&[])
        });
        Metrics::from([("accuracy".to_owned(), right.sum::<f64>() / self.data.test.len() as f64)])
    }
}

fn main() -> ExitCode {
    psjobs_worker::main(Clothes::open)
}
