//! `train mnist-remote`.

use std::path::PathBuf;

use clap::Args;
use psjobs_api::ReplicaResult;
use tch::Device;

use super::remote::{RemoteArgs, finish};
use crate::data::mnist::{Mnist, Set};
use crate::workload::mnist_remote;
use psjobs_process::Failure;
use psjobs_worker::cli::training_length::TrainingLengthArgs;
use psjobs_worker::data::DATA_VARIABLE;

/// Flags of `train mnist-remote`.
#[derive(Clone, Debug, Args)]
pub struct MnistRemoteArgs {
    #[command(flatten)]
    extent: TrainingLengthArgs,
    /// Folder of the data set [default: where `make mnist` puts it]
    #[arg(long, value_name = "DIR", env = DATA_VARIABLE)]
    data: Option<PathBuf>,
    /// CUDA devices of the server that the network uses; with 2 it is split after its second
    /// convolution [default: those that the server has, at most 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=2))]
    num_gpus: Option<u32>,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl MnistRemoteArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        let (environment, signals) = self.remote.begin()?;
        let folder = Set::Mnist.folder(self.data.as_deref()).map_err(Failure::input)?;
        let data = Mnist::open(&folder, Device::Cpu).map_err(Failure::opening)?;
        let training = &environment.training;
        let settings = mnist_remote::Settings {
            plan: self.extent.plan(Some(&environment), Device::Cpu),
            optimizer: training.optimizer.clone(),
            num_gpus: self.num_gpus,
            connect_timeout: self.remote.connect_timeout(Some(&environment)),
        };
        let stop = || signals.heard().is_some();
        finish(mnist_remote::train(&environment, &data, &settings, || signals.defer(), stop), &environment, &signals)
    }
}
