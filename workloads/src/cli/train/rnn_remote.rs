//! `train rnn-remote`.

use std::path::PathBuf;

use clap::Args;
use psjobs_api::ReplicaResult;
use tch::Device;
use tracing::info;

use super::remote::{RemoteArgs, finish};
use crate::data::text::{self, Vocabulary};
use crate::workload::rnn_remote::{self, Settings, Size};
use psjobs_process::Failure;
use psjobs_worker::cli::training_length::TrainingLengthArgs;
use psjobs_worker::data::{DATA_VARIABLE, locate};

/// Flags of `train rnn-remote`.
#[derive(Clone, Debug, Args)]
pub struct RnnRemoteArgs {
    /// Text to train on, its last tenth held out; or a folder with text.txt [default: where `make text` puts it]
    #[arg(long, value_name = "PATH", env = DATA_VARIABLE)]
    data: Option<PathBuf>,
    /// Words of the vocabulary, the most frequent of the text
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(2..))]
    words: u32,
    /// Numbers in a word's vector
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    width: u32,
    /// Numbers in a state of the LSTM
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    hidden: u32,
    /// Layers of the LSTM
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    layers: u32,
    /// Words of each text read in one step
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    length: u32,
    #[command(flatten)]
    extent: TrainingLengthArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl RnnRemoteArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        let (environment, signals) = self.remote.begin()?;
        let place = locate(self.data.as_deref(), "text").map_err(Failure::input)?;
        let file = if place.is_dir() { place.join("text.txt") } else { place };
        let text = text::read(&file).map_err(Failure::opening)?;
        let vocabulary = Vocabulary::build(&text, self.words as usize);
        let words = vocabulary.tokens(&text);
        info!(file = %file.display(), words = words.len(), vocabulary = vocabulary.size(), "text is read");
        let training = &environment.training;
        let settings = Settings {
            plan: self.extent.plan(Some(&environment), Device::Cpu),
            size: Size {
                words: vocabulary.size() as i64,
                width: self.width.into(),
                hidden: self.hidden.into(),
                layers: self.layers.into(),
            },
            length: self.length.into(),
            optimizer: training.optimizer.clone(),
            connect_timeout: self.remote.connect_timeout(Some(&environment)),
        };
        let stop = || signals.heard().is_some();
        finish(rnn_remote::train(&environment, &words, &settings, || signals.defer(), stop), &environment, &signals)
    }
}
