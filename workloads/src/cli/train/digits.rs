//! `train mnist` and `train mlp`.

use anyhow::Result;
use clap::Args;
use psjobs_api::ReplicaResult;
use tch::nn;

use crate::data::mnist::{Mnist, Set};
use crate::data::streamed_images::StreamedImages;
use crate::workload::digits::Digits;
use psjobs_process::Failure;
use psjobs_worker::cli::train::{Source, TrainArgs};

/// The data set to classify.
#[derive(Clone, Debug, Args)]
pub struct SetArgs {
    /// The images to classify
    #[arg(long, value_enum, default_value_t)]
    dataset: Set,
}

impl SetArgs {
    pub fn open<M>(&self, source: &Source, build: fn(&nn::Path) -> M) -> Result<Digits<M>> {
        if let Some(url) = source.url() {
            let (train, test) = StreamedImages::open(url, self.dataset, &source.settings, source.device)?;
            return Ok(Digits::streamed(train, test, build));
        }
        let folder = self.dataset.folder(source.data.as_deref())?;
        Ok(Digits::new(Mnist::open_set(self.dataset, &folder, source.device)?, build))
    }
}

#[derive(Clone, Debug, Args)]
pub struct DigitsArgs {
    #[command(flatten)]
    set: SetArgs,
    #[command(flatten)]
    train: TrainArgs,
}

impl DigitsArgs {
    pub fn run<M: nn::ModuleT>(&self, build: fn(&nn::Path) -> M) -> Result<ReplicaResult, Failure> {
        self.train.run(|source| self.set.open(source, build))
    }
}
