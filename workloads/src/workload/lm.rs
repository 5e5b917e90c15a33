//! A language model on any text: the next word from those before it.

use tch::nn;
use tch::{Device, Reduction, Tensor};

use crate::data::text::Windows;
use crate::model::language::{LanguageModel, Sizes, unigram_loss};
use psjobs_worker::data::Dataset;
use psjobs_worker::device::evaluation_batch;
use psjobs_worker::{Metrics, Workload};

/// Windows that evaluation reads at once on a CPU.
const EVALUATION_BATCH: usize = 32;

/// The model and the text.
#[derive(Debug)]
pub struct Lm {
    sizes: Sizes,
    train: Windows,
    held_out: Windows,
    /// Windows of it that evaluation reads at once.
    evaluated_at_once: usize,
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
        // Widest are the scores of all words for each token.
        let window_bytes = cut.window * sizes.words as usize * size_of::<f32>();
        Self {
            sizes,
            evaluated_at_once: evaluation_batch(device, EVALUATION_BATCH, window_bytes),
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
        for windows in windows.chunks(self.evaluated_at_once) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_perplexity_depends_on_the_windows_that_are_read_at_once_by_rounding_alone() {
        let tokens: Vec<i64> = (0..900).map(|place: i64| place * place % 11).collect();
        let sizes = Sizes { words: 11, embedding: 4, hidden: 6 };
        let few = Lm::new(&tokens, Cut { window: 5, held_out: 601 }, sizes, Device::Cpu);
        assert_eq!((few.evaluated_at_once, few.held_out.examples()), (EVALUATION_BATCH, 120));
        let many =
            Lm { evaluated_at_once: 1024, ..Lm::new(&tokens, Cut { window: 5, held_out: 601 }, sizes, Device::Cpu) };
        let store = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(3);
        let model = few.model(&store.root());
        let [few, many] = [few, many].map(|lm| tch::no_grad(|| lm.evaluate(&model))["perplexity"]);
        assert!((few / many - 1.0).abs() < 1e-6, "{few} and {many}");
        assert!(few > 1.0, "{few}");
    }
}
