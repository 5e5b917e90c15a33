//! `train mnist-remote`.

use std::path::PathBuf;

use clap::Args;
use psjobs_api::ReplicaResult;
use tch::Device;

use super::remote::{RemoteArgs, finish};
use crate::cli::Failure;
use crate::data::DATA_VARIABLE;
use crate::data::mnist::{Mnist, Set};
use crate::train::Plan;
use crate::workload::mnist_remote;

/// Flags of `train mnist-remote`.
#[derive(Clone, Debug, Args)]
pub struct MnistRemoteArgs {
    /// Passes over the training set, of all trainers together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// End after this many steps, even if the epochs are not over
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,
    /// Examples this trainer reads in one step [default: the job's batch.base, 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_size: Option<u32>,
    /// Folder of the data set [default: where `make mnist` puts it]
    #[arg(long, value_name = "DIR", env = DATA_VARIABLE)]
    data: Option<PathBuf>,
    /// CUDA devices of the server that the network uses; with 2 it is split after its second
    /// convolution [default: those that the server has, at most 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=2))]
    num_gpus: Option<u32>,
    /// Steps between two lines in the log, and between two looks at the gradients
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl MnistRemoteArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        let (environment, signals) = self.remote.begin()?;
        let folder = Set::Mnist.folder(self.data.as_deref()).map_err(Failure::input)?;
        let data = Mnist::open(&folder, Device::Cpu).map_err(Failure::input)?;
        let training = &environment.training;
        let plan = Plan {
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch: self.batch_size.unwrap_or(training.batch.base) as usize,
            seed: training.seed,
            trainer: environment.index as usize,
            trainers: environment.trainers as usize,
            device: Device::Cpu,
            log_every: self.log_every,
            evaluate_every: None,
            save: None,
        };
        let settings = mnist_remote::Settings {
            plan,
            optimizer: training.optimizer.clone(),
            num_gpus: self.num_gpus,
            patience: self.remote.patience(),
        };
        let stop = || signals.heard().is_some();
        finish(mnist_remote::train(&environment, &data, &settings, || signals.defer(), stop), &signals)
    }
}
