//! `psjobs run`: a job's servers and trainers as processes of this machine, with the environment that
//! the operator gives to pods.

mod cluster_only;
mod command_job;
mod exit;
mod expand;
pub mod guard;
mod lifecycle;
mod log;
pub mod machine;
mod page;
mod plan;
mod process;
mod readiness;
mod results;
mod signals;
mod status;
mod status_file;
mod summary;
mod supervise;
mod view;

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use psjobs_api::crd::ParameterServerJob;
use psjobs_ps::proto::StatusReply;
use psjobs_web::Door;

use crate::bad_input::BadInput;
use crate::setting::Setting;
use crate::validate;
use command_job::Size;
use lifecycle::{Ending, Outcome};
use log::log_file;
use page::Page;
use plan::Plan;
use signals::Signals;
use status_file::StatusFile;
pub use summary::{State, Summary};
pub use supervise::Observer;
use supervise::Supervisor;
use view::View;
pub use view::{Progress, Wish};

/// Run a job's servers and trainers on this machine
///
/// Starts them as local processes, with the environment that the operator gives to pods. A container
/// that names a command runs it; one that does not runs psjobs-worker with its args, whatever its image.
/// The policies of the spec mean what they mean on a cluster. Fields that mean nothing on one machine, as
/// volumes and resources, are named in a warning and ignored.
///
/// A command behind -- needs no manifest: `psjobs run -- python train.py` starts it as each of two trainers.
///
/// Exit code: 0 the job succeeded, 1 it failed, 2 the manifest or a flag is wrong, 130 after Ctrl-C.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Manifest with one ParameterServerJob; - reads standard input
    #[arg(required_unless_present = "command", conflicts_with = "command")]
    file: Option<PathBuf>,
    /// Command that each trainer runs, instead of a manifest
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// How many trainers run the command; with a manifest: --set trainer.replicas=N [default: 2]
    #[arg(long, value_name = "N", conflicts_with = "file", value_parser = clap::value_parser!(u32).range(1..))]
    trainers: Option<u32>,
    /// How many servers hold the parameters of the command's trainers; with a manifest: --set ps.replicas=N [default: 1]
    #[arg(long, value_name = "N", conflicts_with = "file", value_parser = clap::value_parser!(u32).range(1..))]
    servers: Option<u32>,
    /// GPUs for each trainer of the command; with a manifest: --set trainer.gpus=N [default: 1 if this machine has any]
    #[arg(long, value_name = "N", conflicts_with = "file", value_parser = clap::value_parser!(u32).range(0..=64))]
    gpus: Option<u32>,
    /// Set a field of spec, as training.optimizer.type=Adam; may be repeated
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    settings: Vec<Setting>,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// The psjobs-worker to run [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
    /// Folder of the data set, handed to the processes as PSJOB_DATA
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Keep what the processes write in this folder, the metrics over time for TensorBoard in its folder `metrics`, and
    /// the job's page in NAME.html [default: a temporary one, kept if the job fails, without metrics]
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Folder for the checkpoints of jobs with spec.checkpoint, each in a folder of its name, or the URL of one in an object
    /// store, as s3://BUCKET/FOLDER [default: that of spec.checkpoint.objectStore, else checkpoints]
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// Serve a web page of the job: curves, processes, logs, what to do; with --web=127.0.0.1:9000 at that address [default:
    /// the first free port of this machine from 8090 on]
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, require_equals = true)]
    web: Option<Option<SocketAddr>>,
    /// Write how far the job is to this file as JSON, twice a second
    #[arg(long, value_name = "FILE")]
    status_file: Option<PathBuf>,
    /// Show every line that the processes write
    #[arg(long, short)]
    verbose: bool,
    /// Plain lines instead of bars, on a terminal too
    #[arg(long)]
    no_progress: bool,
    /// Only warnings and the summary
    #[arg(long, short)]
    quiet: bool,
}

/// The settings of a run, beside the job.
#[derive(Debug)]
pub struct Options {
    pub worker: Option<PathBuf>,
    pub data: Option<PathBuf>,
    pub log_dir: Option<PathBuf>,
    /// Holds a folder for each job that keeps checkpoints.
    pub checkpoint_dir: PathBuf,
    /// Where the page of the job is served, if it is.
    pub door: Option<Door>,
    pub wish: Wish,
}

/// Where checkpoints go by default.
pub const CHECKPOINTS: &str = "checkpoints";

impl RunArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let mut job = match &self.file {
            Some(file) => validate::only_job(file, &self.settings)?,
            None => {
                let size = Size {
                    trainers: self.trainers.unwrap_or(2),
                    servers: self.servers.unwrap_or(1),
                    gpus: self.gpus.unwrap_or_else(|| u32::from(!machine::gpus().is_empty())),
                };
                let document = command_job::document(&self.command, size)?;
                validate::job_of(vec![document], &self.settings, Path::new("--set"))?
            }
        };
        if self.checkpoint_dir.is_some() {
            keep_elsewhere(&mut job);
        }
        let progress = match (self.quiet, self.no_progress) {
            (true, _) => Progress::None,
            (false, true) => Progress::Lines,
            (false, false) => Progress::Fitting,
        };
        let door = self.web.map(Door::open).transpose().map_err(|error| BadInput::new(format!("--web: {error}")))?;
        let mut options = Options {
            worker: self.worker,
            data: self.data,
            log_dir: self.log_dir,
            checkpoint_dir: self.checkpoint_dir.unwrap_or_else(|| CHECKPOINTS.into()),
            door,
            wish: Wish { progress, output: self.verbose },
        };
        let mut observer: Box<dyn FnMut(&StatusReply)> = match self.status_file {
            Some(file) => Box::new(StatusFile::new(file)?.into_observer()),
            None => Box::new(|_| {}),
        };
        let (summary, signal) = execute(&job, &mut options, &mut *observer)?;
        let text = if self.json { serde_json::to_string(&summary)? } else { summary.to_string() };
        // A reader that has gone away wants no summary.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(match (summary.state, signal) {
            (_, Some(signal)) => 128 + signal as u8,
            (State::Succeeded, None) => 0,
            (State::Failed | State::Interrupted, None) => 1,
        })
    }
}

/// Takes a job's object store away, so that the folder of the command line is where its checkpoints are.
fn keep_elsewhere(job: &mut ParameterServerJob) {
    if let Some(checkpoint) = &mut job.spec.checkpoint {
        checkpoint.object_store = None;
    }
}

/// Runs a job to its end. The number is that of the signal that ended it.
pub fn execute(
    job: &ParameterServerJob,
    options: &mut Options,
    observer: Observer,
) -> anyhow::Result<(Summary, Option<i32>)> {
    let mut scratch = tempfile::Builder::new().prefix("psjobs-").tempdir().context("cannot make a temporary folder")?;
    let logs = match &options.log_dir {
        Some(folder) => folder.clone(),
        None => scratch.path().to_owned(),
    };
    fs::create_dir_all(&logs).with_context(|| format!("cannot make the folder {} for logs", logs.display()))?;
    let servers = job.spec.servers().unsigned_abs();
    let results = scratch.path().to_owned();
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let machine = machine::look(name, servers, options, results)?;
    let plan = Plan::new(job, machine).map_err(|error| BadInput::new(error.to_string()))?;

    let mut view = View::new(options.wish, &plan);
    greet(&view, &plan, &logs);
    let record = options.log_dir.as_ref().map(|folder| folder.join(format!("{}.html", plan.name)));
    let door = options.door.take();
    if let Some(door) = &door {
        view.say_always(&format!("the job's page: {}", door.address));
    }
    if let Some(record) = &record {
        view.say(&format!("the job's page when it is over: {}", record.display()));
    }
    if door.is_some() || record.is_some() {
        view.add_page(Page::new(job, &plan, &logs));
    }
    let began = Instant::now();
    // One thread: it only waits, and leaves the machine to the job.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (ending, summary) = runtime.block_on(async {
        let server = view.page().zip(door).map(|(page, door)| page.serve(door)).transpose()?;
        let mut signals = Signals::listen()?;
        let mut supervisor = Supervisor::new(&plan, &mut view, observer, &logs)?;
        let ending = supervisor.run(&mut signals).await;
        let restarts = supervisor.restarts();
        let summary = Summary::new(&plan, &ending, restarts, &results::read_all(&plan), began.elapsed());
        if let Some(page) = view.page()
            && let Err(error) = page.conclude(&summary, record.as_deref())
        {
            view.warn(&format!("the job's page was not written: {error}"));
        }
        if let Some(server) = server {
            page::farewell(server).await;
        }
        anyhow::Ok((ending, summary))
    })?;
    drop(view);
    match ending {
        Ending::Over(Outcome::Succeeded) => Ok((summary, None)),
        Ending::Interrupted(signal) => Ok((summary, Some(signal))),
        Ending::Over(Outcome::Failed { reason, cause }) => {
            if options.log_dir.is_none() {
                // The logs are in it.
                scratch.disable_cleanup(true);
            }
            lament(&plan, &reason, cause.as_ref(), &logs);
            Ok((summary, None))
        }
    }
}

fn greet(view: &View, plan: &Plan, logs: &Path) {
    let plural = |count: u32, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    let (servers, trainers) = (plural(plan.servers, "server"), plural(plan.trainers, "trainer"));
    view.say(&format!("{}: {servers} and {trainers} on this machine; logs in {}", plan.name, logs.display()));
    if let Some(metrics) = plan.metrics_folder() {
        view.say(&format!("metrics over time: tensorboard --logdir {}", metrics.display()));
    }
    plan.notes.iter().for_each(|note| view.say(&format!("note: {note}")));
    plan.warnings.iter().for_each(|warning| view.warn(warning));
}

fn lament(plan: &Plan, reason: &str, cause: Option<&lifecycle::Failure>, logs: &Path) {
    let mut text = format!("error: job {} failed: {reason}\n", plan.name);
    if let Some(cause) = cause {
        let log = log_file(logs, cause.replica);
        let what = format!("{} (rank {})", cause.replica, plan.rank(cause.replica));
        text += &match cause.tail.as_slice() {
            [] => format!("the first to fail was {what}, which {} and wrote nothing\n", cause.exit),
            tail => {
                let tail: String = tail.iter().map(|line| format!("  {line}\n")).collect();
                format!("the first to fail was {what}, which {}; its last lines:\n{tail}", cause.exit)
            }
        };
        if log.exists() {
            text += &format!("all of them: {}\n", log.display());
        }
    }
    std::io::stderr().write_all(text.as_bytes()).ok();
}
