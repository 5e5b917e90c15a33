//! The configuration of a server.

use std::collections::BTreeMap;
use std::time::Duration;

use psjobs_api::{Environment, Training};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::checkpoint::{Disk, Folder};
use crate::client::Reading;
use crate::layout::TensorSpec;
use crate::network::Network;
use crate::retry::WITHOUT_LIMIT;

/// The configuration of one server.
#[derive(Debug)]
pub struct ServerConfig {
    /// The job; trainers of another one are refused.
    pub job_uid: String,
    /// Index of this server among the job's servers.
    pub index: u32,
    /// How often this server was replaced. Of two processes of one server, that with the higher number counts.
    pub incarnation: u32,
    /// Number of servers.
    pub servers: u32,
    /// Number of trainers; in an elastic job the maximum.
    pub trainers: u32,
    /// The minimum of trainers of an elastic job, in which trainers join and leave.
    pub min_trainers: Option<u32>,
    /// Trainers that had finished before this server started, which waits for none of them; none in an elastic job.
    pub finished_trainers: Vec<u32>,
    /// Consistency, optimizer and seed.
    pub training: Training,
    /// When trainers are reported as missing or lost, and when the server gives up.
    pub timeouts: Timeouts,
    /// Somebody starts trainers that failed again, so that this server waits for them.
    pub supervised: bool,
    /// Exchange blocks through shared memory with trainers of this host.
    pub shared_memory: bool,
    /// `host:port` at which others reach this server, so that it learns of a process that has taken its place.
    pub address: Option<String>,
    /// `host:port` of every server, in order, if each block is held by two of them; else empty.
    pub replicas: Vec<String>,
    /// Where checkpoints are written, if anywhere.
    pub checkpoint: Option<CheckpointConfig>,
    /// Where server 0 writes the series of metrics; with checkpoints by default beside them.
    pub series: Option<Folder>,
    /// Where `/metrics`, `/status`, `/healthz` and `/readyz` are served, if anywhere.
    pub metrics: Option<TcpListener>,
    /// Evaluation of the model during training, on one server of a job.
    pub evaluation: Option<Evaluation>,
    /// Why trainers with parameters for this server are refused, if they are.
    pub refuses_parameters: Option<&'static str>,
    /// The network that the other servers are reached through.
    pub network: Network,
    /// Further gRPC services on the same port.
    pub services: Routes,
    /// Cancelled when the server begins to end, so that those services end their streams.
    pub ending: CancellationToken,
}

impl ServerConfig {
    /// Reads the configuration of a server from `environment`.
    #[must_use]
    pub fn new(environment: &Environment) -> Self {
        Self {
            job_uid: environment.uid.clone(),
            index: environment.index,
            incarnation: environment.incarnation,
            servers: environment.servers.len() as u32,
            trainers: environment.trainers,
            min_trainers: environment.min_trainers,
            finished_trainers: environment.finished_trainers.clone(),
            training: environment.training.clone(),
            timeouts: Timeouts::new(environment.supervised),
            supervised: environment.supervised,
            shared_memory: true,
            address: environment.servers.get(environment.index as usize).cloned(),
            replicas: if environment.replication_factor > 1 { environment.servers.clone() } else { Vec::new() },
            checkpoint: CheckpointConfig::new(environment),
            series: environment.metrics_folder.as_ref().map(|folder| Folder::new(Disk::System, folder)),
            metrics: None,
            evaluation: None,
            refuses_parameters: None,
            network: Network::default(),
            services: Routes::default(),
            ending: CancellationToken::new(),
        }
    }
}

/// Returns why a job with these settings cannot be elastic and what to change, if so.
#[must_use]
pub fn inelastic(training: &Training) -> Option<&'static str> {
    if training.consistency.backup_trainers > 0 {
        return Some(
            "an elastic job waits for all trainers that are there, not for all but some; remove backupTrainers, or the \
             minimum of trainers",
        );
    }
    if training.consistency.exact_recovery == Some(true) {
        return Some(
            "the steps of an elastic job have no one result; remove exactRecovery, or the minimum of trainers",
        );
    }
    training.batch.adaptive.then_some(
        "in an elastic job a fast trainer reads more batches, not larger ones; remove the adaptive batch, or the minimum \
         of trainers",
    )
}

/// The timeouts of trainers.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// A trainer that has not joined after this long is reported.
    pub join: Duration,
    /// A trainer that has been silent for this long is lost, and reported.
    pub silence: Duration,
    /// The server gives up when no trainer has been active for this long.
    pub abandon: Duration,
}

impl Timeouts {
    /// The defaults; a `supervised` server waits for trainers without limit, because somebody starts them again.
    #[must_use]
    pub const fn new(supervised: bool) -> Self {
        let abandon = if supervised { WITHOUT_LIMIT } else { Duration::from_secs(600) };
        Self { join: Duration::from_secs(60), silence: Duration::from_secs(30), abandon }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::new(false)
    }
}

/// Where and how often checkpoints are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Name of the job, for the lock of the folder and the record of the run.
    pub job: String,
    /// How often this server was started before.
    pub incarnation: u32,
    /// Folder that all servers of the job share.
    pub folder: Folder,
    /// Time between two checkpoints.
    pub interval: Duration,
    /// Complete checkpoints to keep.
    pub keep: usize,
    /// A new run begins from the newest checkpoint in the folder, if there is one.
    pub resume: bool,
    /// `host:port` of every server, in order.
    pub servers: Vec<String>,
}

impl CheckpointConfig {
    /// Reads the settings from `environment`, `None` if the job has no checkpoints.
    #[must_use]
    pub fn new(environment: &Environment) -> Option<Self> {
        let checkpoint = environment.checkpoint.as_ref()?;
        Some(Self {
            job: environment.name.clone(),
            incarnation: environment.incarnation,
            folder: Folder::new(Disk::System, &checkpoint.folder),
            interval: Duration::from_secs(checkpoint.policy.interval_seconds),
            keep: checkpoint.policy.keep as usize,
            resume: checkpoint.policy.resume,
            servers: environment.servers.clone(),
        })
    }
}

/// A periodic evaluation of the model.
#[derive(Debug)]
pub struct Evaluation {
    tensors: Vec<TensorSpec>,
    pub(super) every: Duration,
    pub(super) reading: Reading,
    pub(super) measurements: mpsc::Sender<Measurement>,
}

/// Parameters to evaluate.
#[derive(Debug)]
pub struct Measurement {
    /// The whole flat parameter space.
    pub parameters: Vec<f32>,
    /// Receives the metrics by name.
    pub reply: oneshot::Sender<BTreeMap<String, f64>>,
}

impl Evaluation {
    /// Creates the evaluation of a model of `tensors` in the job of `environment`. The receiver gets the parameters at
    /// the interval `every`, and is closed when the server ends.
    #[must_use]
    pub fn new(
        environment: &Environment,
        tensors: Vec<TensorSpec>,
        every: Duration,
    ) -> (Self, mpsc::Receiver<Measurement>) {
        // The parameters are read again after the last evaluation has ended.
        let (measurements, receiver) = mpsc::channel(1);
        (Self { tensors, every, reading: Reading::new(environment), measurements }, receiver)
    }

    /// Returns the tensors of the model, in the order of the flat space.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }
}
