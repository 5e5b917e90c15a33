//! A small convolutional network for MNIST: two convolutions, two full layers, 1.2 million parameters.

use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use super::{conv3x3, linear};

#[derive(Debug)]
pub struct ConvNet {
    conv1: nn::Conv2D,
    conv2: nn::Conv2D,
    fc1: nn::Linear,
    fc2: nn::Linear,
}

impl ConvNet {
    #[must_use]
    pub fn new(path: &nn::Path) -> Self {
        Self {
            conv1: conv3x3(path / "conv1", 1, 32),
            conv2: conv3x3(path / "conv2", 32, 64),
            fc1: linear(path / "fc1", 9216, 128),
            fc2: linear(path / "fc2", 128, 10),
        }
    }
}

impl nn::ModuleT for ConvNet {
    /// Images `[b, 1, 28, 28]` to log-probabilities `[b, 10]`; dropout only where `train`.
    fn forward_t(&self, images: &Tensor, train: bool) -> Tensor {
        let features = self.conv1.forward(images).relu();
        let features = self.conv2.forward(&features).max_pool2d_default(2);
        let features = features.dropout(0.25, train).flatten(1, -1);
        let hidden = self.fc1.forward(&features).relu().dropout(0.5, train);
        self.fc2.forward(&hidden).log_softmax(-1, Kind::Float)
    }
}
