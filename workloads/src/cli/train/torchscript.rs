//! `train torchscript`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use psjobs_api::ReplicaResult;
use tch::Device;

use crate::data::labelled::Labelled;
use crate::data::mnist::{CLASSES, Mnist, Set};
use crate::data::streamed::Streamed;
use crate::workload::torchscript::{Loss, TorchScript};
use psjobs_process::Failure;
use psjobs_worker::cli::train::{Source, TrainArgs};
use psjobs_worker::data::{self, Dataset as _};

#[derive(Clone, Debug, Args)]
pub struct TorchScriptArgs {
    /// The module, written by torch.jit.script(model).save(FILE)
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// How its output is compared with the targets
    #[arg(long, value_enum)]
    loss: Loss,
    /// Train on these images instead of a file of examples
    #[arg(long, value_enum)]
    dataset: Option<Set>,
    /// File, folder or URL to test on, as --data [default: the last tenth of --data, which is not trained on]
    #[arg(long, value_name = "PATH", conflicts_with = "dataset")]
    test_data: Option<PathBuf>,
    /// Shape of one example's input, for instance 1,28,28 [default: as in the file; a CSV's columns]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', conflicts_with = "dataset", value_parser = clap::value_parser!(i64).range(1..))]
    input_shape: Vec<i64>,
    #[command(flatten)]
    train: TrainArgs,
}

impl TorchScriptArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        match self.dataset {
            Some(set) => self.train.run(|source| self.on_images(set, source)),
            None if self.train.url().is_some() => self.train.run(|source| self.on_stream(source)),
            None => self.train.run(|source| self.on_examples(source)),
        }
    }

    fn on_images(&self, set: Set, source: &Source) -> Result<TorchScript<crate::data::mnist::Examples>> {
        if !self.loss.classifies() {
            bail!("--dataset {} has classes, so --loss mse does not fit; use nll or cross-entropy", set.name());
        }
        if let Some(url) = source.url() {
            let set = set.name();
            bail!(
                "--dataset {set} is read from a folder; leave it out to train on {url}, or name a folder with --data"
            );
        }
        let Mnist { train, test } = Mnist::open_set(set, &set.folder(source.data.as_deref())?, source.device)?;
        Ok(TorchScript::open(&self.model, source.device, self.loss, CLASSES as i64, train, test)?)
    }

    fn on_examples(&self, source: &Source) -> Result<TorchScript<Labelled>> {
        let Some(file) = &source.data else {
            bail!("name the examples, a file or a folder, with --data PATH, or use --dataset mnist")
        };
        let data = self.examples(file, source.device)?;
        let (train, test) = match &self.test_data {
            Some(file) => (data, self.examples(file, source.device)?),
            None => {
                let tenth = (data.examples() / 10).max(1);
                if data.examples() < 2 {
                    bail!("{} holds one example; two are the least, one to train and one to test on", file.display());
                }
                data.split(tenth)
            }
        };
        let classes = if self.loss.classifies() { train.class_count().max(test.class_count()) } else { 0 };
        Ok(TorchScript::open(&self.model, source.device, self.loss, classes, train, test)?)
    }

    fn on_stream(&self, source: &Source) -> Result<TorchScript<Streamed>> {
        let url = source.url().context("--data is no URL")?;
        let open = |url: &str| -> Result<Streamed> {
            let data = Streamed::open(url, self.loss.classifies(), &source.settings, source.device)?;
            let shape = &self.input_shape;
            match shape.is_empty() {
                true => Ok(data),
                false => data.reshaped(shape).with_context(|| {
                    format!(
                        "{url}: --input-shape {shape:?} does not fit the inputs, which have another number of elements"
                    )
                }),
            }
        };
        let data = open(url)?;
        let (train, test) = match self.test_data.as_deref() {
            Some(other) => {
                let other = data::url(Some(other)).context("--data is a URL, so --test-data must be one, too")?;
                let test = open(other)?;
                data.same_classes(&test)?;
                (data, test)
            }
            None if data.examples() < 2 => {
                bail!("{url} holds one example; two are the least, one to train and one to test on")
            }
            None => {
                let tenth = (data.examples() / 10).max(1);
                data.split(tenth)
            }
        };
        let classes = if self.loss.classifies() { train.class_count()?.max(test.class_count()?) } else { 0 };
        // The module is tried out on these examples, where an error of reading could not be said.
        for set in [&train, &test] {
            drop(set.read(&(0..set.examples().min(4) as i64).collect::<Vec<_>>())?);
        }
        let workload = TorchScript::open(&self.model, source.device, self.loss, classes, train, test)?;
        Ok(workload.with_classes(Streamed::below))
    }

    fn examples(&self, file: &Path, device: Device) -> Result<Labelled> {
        let mut data = Labelled::open(file, device)?;
        if !self.input_shape.is_empty() {
            let found = data.input_shape();
            data = data.reshaped(&self.input_shape).with_context(|| {
                let want = &self.input_shape;
                format!(
                    "{}: inputs have the shape {found:?}, which --input-shape {want:?} does not fit",
                    file.display()
                )
            })?;
        }
        if self.loss.classifies() {
            data = data.classes().ok_or_else(|| {
                anyhow!("{}: a target is no class; write whole numbers from 0, or use --loss mse", file.display())
            })?;
        }
        Ok(data)
    }
}
