//! A word-level language model: embedding, one LSTM, and a layer to the words. With 10,000 words, 256
//! and 512 units it has 9.3 million parameters.

use tch::nn::{self, Module, RNN};
use tch::{Device, Kind, Tensor};

use super::{linear, pytorch_default};

#[derive(Debug)]
pub struct LanguageModel {
    embedding: nn::Embedding,
    lstm: nn::LSTM,
    output: nn::Linear,
    hidden: i64,
}

/// Sizes of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub words: i64,
    pub embedding: i64,
    pub hidden: i64,
}

impl LanguageModel {
    #[must_use]
    pub fn new(path: &nn::Path, sizes: Sizes) -> Self {
        let Sizes { words, embedding, hidden } = sizes;
        let uniform = nn::Init::Uniform { lo: -0.1, up: 0.1 };
        let ws_init = uniform;
        let recurrent = pytorch_default(hidden);
        let lstm = nn::RNNConfig {
            w_ih_init: recurrent,
            w_hh_init: recurrent,
            b_ih_init: Some(recurrent),
            b_hh_init: Some(recurrent),
            ..Default::default()
        };
        Self {
            embedding: nn::embedding(
                path / "embedding",
                words,
                embedding,
                nn::EmbeddingConfig { ws_init, ..Default::default() },
            ),
            lstm: nn::lstm(path / "lstm", embedding, hidden, lstm),
            output: linear(path / "output", hidden, words),
            hidden,
        }
    }

    /// Tokens `[b, t]` to scores of every word `[b * t, words]`. The state begins with zeros.
    pub fn forward(&self, tokens: &Tensor) -> Tensor {
        let embedded = self.embedding.forward(tokens);
        // On the device of the input: `seq` would make it where the layer was made, which is the CPU.
        let state = || Tensor::zeros([1, embedded.size()[0], self.hidden], (Kind::Float, embedded.device()));
        let (hidden, _state) = self.lstm.seq_init(&embedded, &nn::LSTMState((state(), state())));
        self.output.forward(&hidden.flatten(0, 1))
    }
}

/// Mean of `-ln p` that the words' frequencies alone give: of `seen` tokens, each word counted once more
/// than it occurs, on `held_out` ones.
#[must_use]
pub fn unigram_loss(seen: &[i64], held_out: &[i64], words: i64) -> f64 {
    let counts = Tensor::from_slice(seen).bincount::<Tensor>(None, words).to_kind(Kind::Double) + 1.0;
    let scores = (&counts / counts.sum(Kind::Double)).log();
    let held_out = Tensor::from_slice(held_out).to(Device::Cpu);
    -scores.index_select(0, &held_out).mean(Kind::Double).double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unigram_loss_follows_from_the_counts() {
        // Of the words 0, 1, 2 there are 0, 1 and 4: with one more each 1/8, 2/8 and 5/8.
        let found = unigram_loss(&[2, 2, 1, 2, 2], &[2, 0], 3);
        let want = -((5.0_f64 / 8.0).ln() + (1.0_f64 / 8.0).ln()) / 2.0;
        assert!((found - want).abs() < 1e-12, "{found}, expected {want}");
    }

    #[test]
    fn every_token_gets_a_score_for_every_word() {
        let store = nn::VarStore::new(Device::Cpu);
        let model = LanguageModel::new(&store.root(), Sizes { words: 7, embedding: 3, hidden: 5 });
        let scores = model.forward(&Tensor::from_slice(&[1_i64, 2, 3, 4, 5, 6]).reshape([2, 3]));
        assert_eq!(scores.size(), [6, 7]);
        let elements: usize = store.variables().values().map(Tensor::numel).sum();
        assert_eq!(elements, 7 * 3 + 4 * 5 * (3 + 5 + 2) + 5 * 7 + 7);
    }
}
