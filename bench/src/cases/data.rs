//! How fast examples come from the local cache if they are ten times what may be in memory, over those that are in memory
//! whole: read alone, and by a trainer that computes with them, as one that trains a perceptron's first layer.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use psjobs_data::{DataSet, Expected, Fields, Kind, Settings, Values};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::report::{Case, say};

/// Examples/s from the local cache with a tenth of the data in memory, over those from memory
#[derive(Debug, Args)]
pub struct DataArgs {
    /// MiB of the data that may be in memory; the data set is ten times as large
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    memory: u32,
    /// Examples that are read in a run
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..))]
    examples: u32,
}

/// Numbers of an example, as of an image of MNIST.
const WIDTH: usize = 784;
/// Units of the layer.
const UNITS: usize = 256;
const BATCH: usize = 64;
/// Batches that wait for the trainer, as in a worker.
const AHEAD: usize = 2;
/// Files of the data set.
const FILES: usize = 8;

impl DataArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let memory = u64::from(self.memory) << 20;
        let rows = (10 * memory) as usize / (WIDTH * 4 + 8);
        let folder = tempfile::tempdir().context("no temporary folder")?;
        say(&format!("data: writes {rows} examples"));
        let source = folder.path().join("data");
        write(&source, rows)?;
        let settings = Settings { cache: Some(20 * memory), cache_dir: Some(folder.path().join("cache")), memory };
        let column = |name: &str, kind, fields| Expected { name: name.to_owned(), kind, shape: None, fields };
        let expected = [column("inputs", Kind::F32, Fields::AllButLast), column("targets", Kind::I64, Fields::Last)];
        let data = DataSet::open(&format!("file://{}", source.display()), &expected, &settings)?;
        say("data: fills the cache");
        let mut whole = Vec::with_capacity(rows * WIDTH);
        for numbers in (0..rows as i64).collect::<Vec<_>>().chunks(4096) {
            whole.extend(inputs(&data, numbers)?);
        }
        let from_memory = |numbers: &[i64]| {
            let mut batch = Vec::with_capacity(numbers.len() * WIDTH);
            for number in numbers {
                batch.extend_from_slice(&whole[*number as usize * WIDTH..(*number as usize + 1) * WIDTH]);
            }
            Ok(batch)
        };
        let mut order: Vec<i64> = (0..rows as i64).collect();
        let mut cases = Vec::new();
        for (case, computes) in [("reading", false), ("training", true)] {
            let (mut values, mut limits) = (Vec::new(), Vec::new());
            for run in 1..=runs {
                say(&format!("data {case}: run {run} of {runs}"));
                order.shuffle(&mut StdRng::seed_from_u64(run.into()));
                let part: Vec<i64> = order.iter().copied().cycle().take(self.examples as usize).collect();
                limits.push(examples_a_second(&part, computes, from_memory)?);
                values.push(examples_a_second(&part, computes, |numbers| inputs(&data, numbers))?);
            }
            cases.push(Case::new("data", case, "examples/s", &values, &limits));
        }
        Ok(cases)
    }
}

/// Writes rows of pixels and a class.
fn write(folder: &Path, rows: usize) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    for file in 0..FILES {
        let mut into = BufWriter::new(File::create(folder.join(format!("part-{file}.csv")))?);
        for row in rows * file / FILES..rows * (file + 1) / FILES {
            for pixel in 0..WIDTH {
                write!(into, "{},", (row * 31 + pixel * 7) % 256)?;
            }
            writeln!(into, "{}", row % 10)?;
        }
        into.flush()?;
    }
    Ok(())
}

fn inputs(data: &DataSet, numbers: &[i64]) -> anyhow::Result<Vec<f32>> {
    match data.read(numbers)?.columns.swap_remove(0) {
        Values::F32(inputs) => Ok(inputs),
        other => bail!("inputs are f32, not {other:?}"),
    }
}

/// Reads batches on one thread and takes them on another, which computes with them or does not.
fn examples_a_second(
    order: &[i64],
    computes: bool,
    read: impl Fn(&[i64]) -> anyhow::Result<Vec<f32>> + Send,
) -> anyhow::Result<f64> {
    let weights = vec![0.01_f32; WIDTH * UNITS];
    let begin = Instant::now();
    thread::scope(|scope| {
        let (sender, batches) = mpsc::sync_channel(AHEAD);
        let reader = scope.spawn(move || {
            for numbers in order.chunks(BATCH) {
                // The other thread takes all of them.
                sender.send(read(numbers)?).ok();
            }
            anyhow::Ok(())
        });
        for batch in batches {
            if computes {
                black_box(layer(&batch, &weights));
            } else {
                black_box(&batch);
            }
        }
        reader.join().map_err(|_| anyhow!("the thread that reads has panicked"))?
    })?;
    Ok(order.len() as f64 / begin.elapsed().as_secs_f64())
}

/// The sums of a full layer, for all examples together.
fn layer(batch: &[f32], weights: &[f32]) -> Vec<f32> {
    let mut sums = vec![0.0_f32; UNITS];
    for example in batch.chunks_exact(WIDTH) {
        for (input, weights) in example.iter().zip(weights.chunks_exact(UNITS)) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += input * weight);
        }
    }
    sums
}
