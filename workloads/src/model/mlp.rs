//! A perceptron with one hidden layer: 784-256-10.

use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use super::linear;

#[derive(Debug)]
pub struct Mlp {
    hidden: nn::Linear,
    output: nn::Linear,
}

impl Mlp {
    #[must_use]
    pub fn new(path: &nn::Path) -> Self {
        Self { hidden: linear(path / "hidden", 784, 256), output: linear(path / "output", 256, 10) }
    }
}

impl nn::ModuleT for Mlp {
    /// Images `[b, 1, 28, 28]` to log-probabilities `[b, 10]`.
    fn forward_t(&self, images: &Tensor, _train: bool) -> Tensor {
        let hidden = self.hidden.forward(&images.flatten(1, -1)).relu();
        self.output.forward(&hidden).log_softmax(-1, Kind::Float)
    }
}
