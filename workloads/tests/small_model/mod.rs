//! A model of two layers, whose losses are the same in each run.

use psjobs_worker::train::flat::Flat;
use tch::nn::{self, Module as _, VarStore};
use tch::{Device, Kind, Tensor};

/// The model of a trainer.
pub struct Model {
    pub store: VarStore,
    net: nn::Sequential,
    steps: u64,
}

impl Model {
    /// Makes the model, with the same parameters each time, for a job whose trainers make `steps` each.
    pub fn new(steps: u64) -> Self {
        let store = VarStore::new(Device::Cpu);
        let root = store.root();
        let net = nn::seq()
            .add(nn::linear(&root / "hidden", 6, 8, nn::LinearConfig::default()))
            .add_fn(Tensor::tanh)
            .add(nn::linear(&root / "output", 8, 3, nn::LinearConfig::default()));
        let mut flat = Flat::of(&store);
        let values: Vec<f32> = (0..flat.elements()).map(|element| (element as f32).sin() / 4.0).collect();
        flat.set(&values);
        Self { store, net, steps }
    }

    /// The loss of a trainer's batch of `step`, another one for each.
    pub fn loss(&self, trainer: u64, step: u64) -> Tensor {
        let first = (trainer * self.steps + step) as i64 * 48;
        let input = Tensor::arange_start(first, first + 48, (Kind::Float, Device::Cpu)).cos().reshape([8, 6]);
        let target = Tensor::arange_start(first, first + 24, (Kind::Float, Device::Cpu)).sin().reshape([8, 3]);
        (self.net.forward(&input) - target).square().mean(Kind::Float)
    }
}
