//! The command line of a job's processes, without libtorch: their place in the job, logs, signals, result and exit code;
//! the server, `serve`; `store`, which reads what it keeps; and `track`, which sends MLflow what it lacks of a job.

pub mod identity;
pub mod logging;
pub mod optimizer;
pub mod result_file;
pub mod serve;
pub mod signals;
pub mod store;
pub mod track;
mod tracking;

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use psjobs_api::env::PSJOB_RESULT_FILE;
use psjobs_api::exit_code::{PEER_AWAY, WRONG_INPUT};
use psjobs_api::{Environment, ReplicaResult};
use psjobs_ps::open_files;

use logging::LogFormat;
use signals::Signal;

/// Flags of every command: what a process leaves behind.
#[derive(Clone, Debug, Args)]
pub struct OutputArgs {
    /// How to log to standard error; RUST_LOG sets the level
    #[arg(long, global = true, help_heading = "Output", value_enum, default_value_t = LogFormat::Human)]
    log_format: LogFormat,
    /// File that takes the result as JSON when this process has done its work
    #[arg(long, global = true, help_heading = "Output", value_name = "FILE", env = PSJOB_RESULT_FILE)]
    result_file: Option<PathBuf>,
}

/// How a command ended when it did not do its work.
#[derive(Debug)]
pub enum Failure {
    /// The input cannot work, however often the process is started: exit code 2, which fails the whole job at once.
    Input(anyhow::Error),
    /// It failed at its work: exit code 1.
    Work(anyhow::Error),
    /// Other processes alone ended it: one is away, and this one was not to wait any longer, or, where somebody starts
    /// processes again, another one has replaced it or has the address of one. Exit code 75, for which the operator and
    /// `psjobs run` start it again without counting that.
    PeerAway(anyhow::Error),
    /// A signal ended it: exit code 128 and the signal's number.
    Signal(Signal),
}

impl Failure {
    pub fn input(error: impl Into<anyhow::Error>) -> Self {
        Self::Input(error.into())
    }

    pub fn work(error: impl Into<anyhow::Error>) -> Self {
        Self::Work(error.into())
    }

    pub fn peer_away(error: impl Into<anyhow::Error>) -> Self {
        Self::PeerAway(error.into())
    }

    /// Returns the exit code of the process that ends so.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input(_) => WRONG_INPUT as u8,
            Self::Work(_) => 1,
            Self::PeerAway(_) => PEER_AWAY as u8,
            Self::Signal(signal) => signal.exit_code(),
        }
    }

    /// Sorts an error of opening a workload's data and model: bad input, unless the system says that it cannot read
    /// now, as over a network that is down or without memory.
    pub fn opening(error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let may_pass = error.chain().filter_map(|cause| cause.downcast_ref()).any(may_pass);
        if may_pass { Self::Work(error) } else { Self::Input(error) }
    }
}

/// Returns true for an error of the system that another try may not meet.
fn may_pass(error: &io::Error) -> bool {
    use io::ErrorKind::{
        AlreadyExists, InvalidData, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied, Unsupported,
    };
    let lasts = matches!(
        error.kind(),
        AlreadyExists
            | InvalidData
            | InvalidInput
            | IsADirectory
            | NotADirectory
            | NotFound
            | PermissionDenied
            | Unsupported
    );
    error.raw_os_error().is_some() && !lasts
}

/// Does `work`, writes its result, and turns what went wrong into a sentence and an exit code.
#[must_use]
pub fn conclude(output: OutputArgs, work: impl FnOnce() -> Result<ReplicaResult, Failure>) -> u8 {
    let OutputArgs { log_format, result_file } = output;
    logging::start(log_format);
    logging::log_panics();
    // Before any work: a server with a thousand trainers, and a trainer of hundreds of servers, have more than the usual 1,024.
    open_files::raise_limit();
    let done = panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Failure::Work(anyhow!(PANICKED))));
    let written = done.and_then(|result| write_result(result_file, &result));
    let Err(failure) = written else { return 0 };
    let code = failure.exit_code();
    if let Failure::Input(error) | Failure::Work(error) | Failure::PeerAway(error) = failure {
        eprintln!("psjobs-worker: {error:#}");
    }
    code
}

const PANICKED: &str =
    "libtorch, or this program, came to a point where it could not go on; the log's last line says which";

fn write_result(file: Option<PathBuf>, result: &ReplicaResult) -> Result<(), Failure> {
    let Some(file) = file else { return Ok(()) };
    result_file::write(&file, result).map_err(|e| {
        Failure::work(anyhow::Error::new(e).context(format!("cannot write the result to {}", file.display())))
    })
}

/// An environment variable of this process, if it is set and readable.
#[must_use]
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns the variables of this process that are text.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// The log's first line: who this is.
pub fn log_place(environment: &Environment) {
    tracing::info!(
        job = environment.name,
        role = %environment.role,
        index = environment.index,
        rank = environment.rank(),
        world_size = environment.world_size(),
        servers = environment.servers.join(","),
        "started"
    );
}
