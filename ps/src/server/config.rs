//! The configuration of a server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use psjobs_api::{Environment, Training};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::client::Reading;
use crate::layout::TensorSpec;
use crate::network::Network;

/// What one server is told.
#[derive(Debug)]
pub struct ServerConfig {
    /// The job; trainers of another one are refused.
    pub job_uid: String,
    /// Place of this server among the job's servers.
    pub index: u32,
    /// Number of servers.
    pub servers: u32,
    /// Number of trainers; in an elastic job the most.
    pub trainers: u32,
    /// The job is elastic: trainers come and go, and it goes on while so many are there.
    pub min_trainers: Option<u32>,
    /// Consistency, optimizer and seed.
    pub training: Training,
    /// When a missing trainer is named, and when the server gives up.
    pub timeouts: Timeouts,
    /// Exchange blocks through shared memory with trainers of this host.
    pub shared_memory: bool,
    /// `host:port` of every server, in order, if each block is held by two of them; else empty.
    pub replicas: Vec<String>,
    /// Where the job's state is kept, if anywhere.
    pub checkpoint: Option<CheckpointConfig>,
    /// Where `/metrics`, `/status`, `/healthz` and `/readyz` are served, if anywhere.
    pub metrics: Option<TcpListener>,
    /// Has the model measured while it trains; on one server of a job.
    pub evaluation: Option<Evaluation>,
    /// What the other servers are reached through.
    pub network: Network,
    /// Further gRPC services on the same port.
    pub services: Routes,
    /// Cancelled when the server begins to end, so that those services end their streams.
    pub ending: CancellationToken,
}

impl ServerConfig {
    /// The configuration of a server in `environment`.
    #[must_use]
    pub fn new(environment: &Environment) -> Self {
        Self {
            job_uid: environment.uid.clone(),
            index: environment.index,
            servers: environment.servers.len() as u32,
            trainers: environment.trainers,
            min_trainers: environment.min_trainers,
            training: environment.training.clone(),
            timeouts: Timeouts::default(),
            shared_memory: true,
            replicas: if environment.replication_factor > 1 { environment.servers.clone() } else { Vec::new() },
            checkpoint: CheckpointConfig::new(environment),
            metrics: None,
            evaluation: None,
            network: Network::default(),
            services: Routes::default(),
            ending: CancellationToken::new(),
        }
    }
}

/// Why a job that trains so cannot be elastic, and what to change.
#[must_use]
pub fn inelastic(training: &Training) -> Option<&'static str> {
    if training.consistency.backup_trainers > 0 {
        return Some(
            "an elastic job waits for all trainers that are there, not for all but some; remove backupTrainers, or the \
             minimum of trainers",
        );
    }
    training.batch.adaptive.then_some(
        "in an elastic job a fast trainer reads more batches, not larger ones; remove the adaptive batch, or the minimum \
         of trainers",
    )
}

/// When silence becomes worth a word.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// A trainer that has not joined after this long is named.
    pub join: Duration,
    /// A trainer that has been silent for this long is taken for lost, and named.
    pub silence: Duration,
    /// The server gives up when no trainer has been active for this long.
    pub abandon: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { join: Duration::from_secs(60), silence: Duration::from_secs(30), abandon: Duration::from_secs(600) }
    }
}

/// Where and how often a job's state is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Folder that all servers of the job share.
    pub folder: PathBuf,
    /// Time between two checkpoints.
    pub interval: Duration,
    /// Complete checkpoints to keep.
    pub keep: usize,
    /// Begin from the newest checkpoint in the folder, if there is one.
    pub resume: bool,
    /// `host:port` of every server, in order.
    pub servers: Vec<String>,
}

impl CheckpointConfig {
    /// The settings in `environment`; `None` if nothing is to be kept.
    #[must_use]
    pub fn new(environment: &Environment) -> Option<Self> {
        let checkpoint = environment.checkpoint.as_ref()?;
        Some(Self {
            folder: checkpoint.folder.clone().into(),
            interval: Duration::from_secs(checkpoint.policy.interval_seconds),
            keep: checkpoint.policy.keep as usize,
            resume: checkpoint.policy.resume,
            servers: environment.servers.clone(),
        })
    }
}

/// How often, and of which model, the parameters are measured.
#[derive(Debug)]
pub struct Evaluation {
    tensors: Vec<TensorSpec>,
    pub(super) every: Duration,
    pub(super) reading: Reading,
    pub(super) measurements: mpsc::Sender<Measurement>,
}

/// Parameters to measure.
#[derive(Debug)]
pub struct Measurement {
    /// The whole flat space.
    pub parameters: Vec<f32>,
    /// Takes the metrics by name.
    pub reply: oneshot::Sender<BTreeMap<String, f64>>,
}

impl Evaluation {
    /// Of a model of these tensors, in the job of `environment`; the receiver gets the parameters `every` so often.
    /// It is closed when the server ends.
    #[must_use]
    pub fn new(
        environment: &Environment,
        tensors: Vec<TensorSpec>,
        every: Duration,
    ) -> (Self, mpsc::Receiver<Measurement>) {
        // The next one is read when the last one is measured.
        let (measurements, receiver) = mpsc::channel(1);
        (Self { tensors, every, reading: Reading::new(environment), measurements }, receiver)
    }

    /// The tensors of the model, in the order of the flat space.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }
}
