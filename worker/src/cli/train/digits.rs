//! `train mnist` and `train mlp`.

use anyhow::Result;
use clap::Args;
use psjobs_api::ReplicaResult;
use tch::nn;

use super::{Source, TrainArgs};
use crate::cli::Failure;
use crate::data::mnist::{Mnist, Set};
use crate::workload::digits::Digits;

#[derive(Clone, Debug, Args)]
pub struct DigitsArgs {
    /// The images to classify
    #[arg(long, value_enum, default_value_t)]
    dataset: Set,
    #[command(flatten)]
    train: TrainArgs,
}

impl DigitsArgs {
    pub fn run<M: nn::ModuleT>(&self, build: fn(&nn::Path) -> M) -> Result<ReplicaResult, Failure> {
        self.train.run(|Source { data, device, .. }| {
            let folder = self.dataset.folder(data.as_deref())?;
            Ok(Digits::new(Mnist::open_set(self.dataset, &folder, *device)?, build))
        })
    }
}
