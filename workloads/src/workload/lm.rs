//! A language model on any text: the next word from those before it.

use tch::nn;
use tch::{Device, Reduction, Tensor};

use crate::data::text::Windows;
use crate::model::language::{LanguageModel, Sizes, unigram_loss};
use psjobs_worker::data::Dataset;
use psjobs_worker::{Metrics, Workload};

/// Windows that evaluation reads at once.
const EVALUATION_BATCH: usize = 32;

/// The model and the text.
#[derive(Debug)]
pub struct Lm {
    sizes: Sizes,
    train: Windows,
    held_out: Windows,
    /// Mean loss of the words' frequencies alone on the held-out text.
    unigram_loss: f64,
}

/// How a text is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tokens in a window.
    pub window: usize,
    /// Tokens at the end that are not trained on.
    pub held_out: usize,
}

impl Lm {
    /// # Panics
    /// If there are too few tokens for a window in both parts.
    #[must_use]
    pub fn new(tokens: &[i64], cut: Cut, sizes: Sizes, device: Device) -> Self {
        let (train, held_out) = tokens.split_at(tokens.len() - cut.held_out);
        Self {
            sizes,
            unigram_loss: unigram_loss(train, held_out, sizes.words),
            train: Windows::new(train, cut.window, device),
            held_out: Windows::new(held_out, cut.window, device),
        }
    }
}

impl Workload for Lm {
    type Model = LanguageModel;
    type Data = Windows;

    fn training_set(&self) -> Windows {
        self.train.clone()
    }

    fn model(&self, path: &nn::Path) -> LanguageModel {
        LanguageModel::new(path, self.sizes)
    }

    fn loss(&self, model: &LanguageModel, (tokens, next): (Tensor, Tensor)) -> Tensor {
        model.forward(&tokens).cross_entropy_for_logits(&next.flatten(0, -1))
    }

    /// `perplexity` on the held-out text, and for comparison `unigram_perplexity`.
    fn evaluate(&self, model: &LanguageModel) -> Metrics {
        let (mut loss, mut tokens) = (0.0, 0);
        let windows: Vec<i64> = (0..self.held_out.examples() as i64).collect();
        for windows in windows.chunks(EVALUATION_BATCH) {
            let (inputs, next) = self.held_out.batch(windows);
            let next = next.flatten(0, -1);
            let scores = model.forward(&inputs);
            let sum = scores.cross_entropy_loss::<Tensor>(&next, None, Reduction::Sum, -100, 0.0);
            loss += sum.double_value(&[]);
            tokens += next.numel();
        }
        Metrics::from([
            ("perplexity".to_owned(), (loss / tokens as f64).exp()),
            ("unigram_perplexity".to_owned(), self.unigram_loss.exp()),
        ])
    }
}
