//! The networks. Their parameters are initialised as PyTorch does it by default, so that results
//! compare with the usual tutorials.

pub mod convnet;
pub mod dlrm;
pub mod language;
pub mod mlp;

use tch::nn;

/// A fully connected layer with PyTorch's default initial values, U(-1/√in, 1/√in).
fn linear(path: nn::Path, inputs: i64, outputs: i64) -> nn::Linear {
    let init = pytorch_default(inputs);
    nn::linear(path, inputs, outputs, nn::LinearConfig { ws_init: init, bs_init: Some(init), bias: true })
}

/// A 3x3 convolution without padding, initialised as [`linear`].
fn conv3x3(path: nn::Path, inputs: i64, outputs: i64) -> nn::Conv2D {
    let init = pytorch_default(inputs * 9);
    nn::conv2d(path, inputs, outputs, 3, nn::ConvConfig { ws_init: init, bs_init: init, ..Default::default() })
}

fn pytorch_default(fan_in: i64) -> nn::Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    nn::Init::Uniform { lo: -bound, up: bound }
}
