//! `psjobs compare`: the same training in several ways, as one page with plots. [`grid`] says what runs, [`record`]
//! what is kept of a run, [`against`] compares with a baseline, [`link`] is a slow network, [`page`], [`sheet`] and [`plot`] draw it all.

mod against;
mod grid;
pub(crate) mod link;
mod page;
mod plot;
mod record;
mod sheet;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum as _};
use psjobs_api::crd::ParameterServerJob;
use serde::Serialize;

use crate::job::worker;
use grid::{Experiment, Extent, Section};
use link::{Carried, Link};
use psjobs::BadInput;
use psjobs::run::{self, Options, Progress, Wish};
use psjobs::setting::Setting;
use record::Record;

/// Compare ways to train, as a page with plots
///
/// Runs the same training in several ways and with several seeds on this machine, and writes one HTML file:
/// accuracy or perplexity over seconds, throughput, waiting and staleness. Needs no network to look at.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The comparison to make
    #[arg(value_enum, default_value_t = Experiment::Modes)]
    experiment: Experiment,
    /// File to write [default: compare-EXPERIMENT.html]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// For local and trainers: file for the plots on top of the page as one picture, an SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Only this way, by its name on the page, as in --way "50 steps"; may be repeated
    #[arg(long = "way", value_name = "NAME")]
    ways: Vec<String>,
    /// Runs of each way, with seeds 1, 2, ... [default: 3; trainers and local: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    seeds: Option<u32>,
    /// Trainers of each job, for modes and local [default: 4; local: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=256))]
    trainers: Option<u32>,
    /// Passes of all trainers together over the training set [default: 8; trainers and local: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    epochs: Option<u32>,
    /// How many times as long the slow trainer takes for a step, for modes
    #[arg(long, value_name = "FACTOR", default_value_t = 3.0)]
    slow: f64,
    /// The network on MNIST: mlp (a perceptron) or mnist (convolutional, slower) [default: mlp; trainers: mnist; local:
    /// always lm, on text]
    #[arg(long, value_name = "WORKLOAD", value_parser = ["mlp", "mnist"])]
    workload: Option<String>,
    /// For codecs and local: speed of the slow link in Mb/s each way; 0: none, which needs no root
    #[arg(long, value_name = "MBIT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=100_000))]
    link_mbit: u32,
    /// For codecs and local: exchanges of each trainer over the slow link [default: 100; local: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    link_steps: Option<u32>,
    /// Set a field of every job, as in --set training.consistency.overlap=true; may be repeated
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    settings: Vec<Setting>,
    /// Print what was measured as one JSON object a line too
    #[arg(long)]
    json: bool,
    /// The psjobs-worker to run [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

impl CompareArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let extent = self.extent();
        let sections = grid::only(self.experiment.sections(&extent), &self.ways)?;
        if self.svg.is_some() && sheet::panels(self.experiment, &sections, &[]).is_empty() {
            return Err(BadInput::new("--svg is for local and trainers; the other pages have no plot on top").into());
        }
        let worker = worker(self.worker.as_deref())?;
        let name = self.experiment.to_possible_value().expect("every experiment has a name");
        let output = self.output.clone().unwrap_or_else(|| format!("compare-{}.html", name.get_name()).into());
        // Found out now rather than after all runs.
        for file in self.svg.iter().chain([&output]) {
            fs::write(file, "").with_context(|| format!("cannot write {}", file.display()))?;
        }
        let seeds = if matches!(self.experiment, Experiment::Trainers | Experiment::Local) { 1 } else { 3 };
        let runs = grid::runs(&sections, self.seeds.unwrap_or(seeds));
        let carried = self.carried(&sections, &extent, &worker)?;
        let mut records = Vec::new();
        for (number, run) in runs.iter().enumerate() {
            let Section { title, ways, .. } = &sections[run.section];
            let way = ways[run.way].name;
            eprintln!("{} of {}: {title}, {way}, seed {}", number + 1, runs.len(), run.seed);
            let job = grid::job(&sections, run, &extent)?;
            let record = measure(&job, Record::new(*run, title, way, self.experiment.metric()), &worker)?;
            self.print(&record)?;
            records.push(record);
        }
        let page = page::page(self.experiment, &sections, &records, &carried, &extent);
        let picture = sheet::sheet(&sheet::panels(self.experiment, &sections, &records));
        for (file, text) in self.svg.iter().map(|file| (file, &picture)).chain([(&output, &page)]) {
            fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
            eprintln!("wrote {}", file.display());
        }
        if let Some(baseline) = self.experiment.baseline() {
            let rows = against::against(baseline, &records);
            match self.json {
                true => rows.iter().try_for_each(|row| self.print(row))?,
                false => _ = write!(std::io::stdout(), "{}", against::table(&rows, self.experiment.metric().name)),
            }
        }
        Ok(0)
    }

    fn print(&self, measured: &impl Serialize) -> anyhow::Result<()> {
        if self.json {
            // A reader that has gone away wants no line.
            writeln!(std::io::stdout(), "{}", serde_json::to_string(measured)?).ok();
        }
        Ok(())
    }

    /// Measures each way over the slow link.
    fn carried(&self, sections: &[Section], extent: &Extent, worker: &Path) -> anyhow::Result<Vec<Carried>> {
        if !self.experiment.has_link() || self.link_mbit == 0 {
            return Ok(Vec::new());
        }
        let link = Link::make(self.link_mbit)?;
        let runs = grid::runs(sections, 1).into_iter().map(|run| {
            let way = &sections[run.section].ways[run.way];
            eprintln!("{} over {} Mb/s", way.name, self.link_mbit);
            let training = &grid::job(sections, &run, extent)?.spec.training;
            let job = link::Job { worker, workload: &extent.workload, training, trainers: way.trainers };
            let exchanges = self.link_steps.unwrap_or(if self.experiment == Experiment::Local { 4 } else { 100 });
            let carried = link.carry(way.name, job, exchanges * way.steps_per_exchange())?;
            self.print(&carried)?;
            Ok(carried)
        });
        runs.collect()
    }

    fn extent(&self) -> Extent {
        let Self { trainers, epochs, slow, ref workload, ref settings, .. } = *self;
        let (least, passes, evaluate_every, network) = match self.experiment {
            Experiment::Local => (2, 1, 20, "lm"),
            Experiment::Trainers => (4, 1, 5, "mnist"),
            _ => (4, 8, 1, "mlp"),
        };
        let (trainers, epochs) = (trainers.unwrap_or(least), epochs.unwrap_or(passes));
        let network = workload.as_deref().filter(|_| self.experiment != Experiment::Local).unwrap_or(network);
        Extent { trainers, epochs, evaluate_every, slow, workload: network.into(), settings: settings.clone() }
    }
}

/// Runs a job to its end, good or bad.
fn measure(job: &ParameterServerJob, mut record: Record, worker: &Path) -> anyhow::Result<Record> {
    let mut options = Options {
        worker: Some(worker.to_owned()),
        data: None,
        log_dir: None,
        checkpoint_dir: run::CHECKPOINTS.into(),
        door: None,
        wish: Wish { progress: Progress::None, output: false },
    };
    let mut began = None;
    let (summary, signal) = run::execute(job, &mut options, &mut |status| {
        if status.step > 0 {
            let began = *began.get_or_insert_with(Instant::now);
            record.observe(began.elapsed().as_secs_f64(), status);
        }
    })?;
    ensure!(signal.is_none(), "interrupted; no page was written");
    record.conclude(&summary, began.map_or(0.0, |began: Instant| began.elapsed().as_secs_f64()));
    Ok(record)
}
