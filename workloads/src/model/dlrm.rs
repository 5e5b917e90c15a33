//! A model of clicks (Naumov et al., DLRM, 2019): a perceptron for the numbers, a vector for each
//! category, the products of all pairs of these, and a perceptron on top. It has stages, see
//! [`psjobs_worker::train::staged_backward`]; the vectors come from outside.

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use super::linear;
use psjobs_worker::train::staged_backward::Tape;

/// Units of the layers; the last of the lower ones is a category's vector, the last of the upper ones the score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub numbers: i64,
    pub categories: i64,
    /// Numbers in a vector.
    pub width: i64,
    pub lower: Vec<i64>,
    pub upper: Vec<i64>,
}

#[derive(Debug)]
pub struct Dlrm {
    lower: Vec<nn::Linear>,
    upper: Vec<nn::Linear>,
    /// Places of the pairs in a flattened square of products.
    pairs: Tensor,
}

impl Dlrm {
    #[must_use]
    pub fn new(path: &nn::Path, sizes: &Sizes) -> Self {
        let vectors = sizes.categories + 1;
        let stack = |name: &str, inputs: i64, units: &[i64]| -> Vec<nn::Linear> {
            let inputs = std::iter::once(inputs).chain(units.iter().copied());
            inputs.zip(units).enumerate().map(|(i, (inputs, units))| linear(path / name / i, inputs, *units)).collect()
        };
        let lower: Vec<i64> = sizes.lower.iter().copied().chain([sizes.width]).collect();
        let upper: Vec<i64> = sizes.upper.iter().copied().chain([1]).collect();
        let pairs: Vec<i64> = (0..vectors).flat_map(|i| (0..i).map(move |j| i * vectors + j)).collect();
        Self {
            lower: stack("lower", sizes.numbers, &lower),
            upper: stack("upper", sizes.width + pairs.len() as i64, &upper),
            pairs: Tensor::from_slice(&pairs).to(Device::Cpu),
        }
    }

    /// Scores `[b]` of numbers `[b, n]` and vectors `[k, width]`, of which `places`, `[b, categories]`, says which
    /// are an example's. A cut after the lower layers and after each of the upper ones but the last.
    pub fn forward(&self, numbers: &Tensor, vectors: &Tensor, places: &Tensor, tape: &mut Tape) -> Tensor {
        let lower = self.lower.iter().fold(numbers.shallow_clone(), |x, layer| layer.forward(&x).relu());
        let lower = tape.cut(lower);
        let (batch, categories) = (places.size()[0], places.size()[1]);
        let vectors = vectors.index_select(0, &places.flatten(0, -1)).view([batch, categories, -1]);
        let all = Tensor::cat(&[lower.unsqueeze(1), vectors], 1);
        let products = all.bmm(&all.transpose(1, 2)).flatten(1, -1).index_select(1, &self.pairs);
        let mut x = Tensor::cat(&[lower, products], 1);
        let (last, others) = self.upper.split_last().expect("there is a score");
        for layer in others {
            x = tape.cut(layer.forward(&x).relu());
        }
        last.forward(&x).squeeze_dim(1)
    }

    /// The parameters of each stage, the first first.
    #[must_use]
    pub fn stages(&self) -> Vec<Vec<Tensor>> {
        let of = |layer: &nn::Linear| [Some(layer.ws.shallow_clone()), layer.bs.as_ref().map(Tensor::shallow_clone)];
        let lower = self.lower.iter().flat_map(of).flatten().collect();
        let upper = self.upper.iter().map(|layer| of(layer).into_iter().flatten().collect());
        std::iter::once(lower).chain(upper).collect()
    }

    /// Mean of `-ln p` of what happened.
    pub fn loss(scores: &Tensor, clicked: &Tensor) -> Tensor {
        scores.binary_cross_entropy_with_logits::<Tensor>(clicked, None, None, tch::Reduction::Mean)
    }

    /// Examples' scores as numbers.
    #[must_use]
    pub fn values(scores: &Tensor) -> Vec<f64> {
        Vec::try_from(scores.to_kind(Kind::Double)).expect("one score for each example")
    }
}
