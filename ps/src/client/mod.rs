//! The client of the servers. [`Session`] is synchronous, because a training loop
//! is; behind it a runtime of its own keeps the streams and sends heartbeats while the trainer computes.
//! [`AsyncSession`] is the same on the runtime of its caller.

mod attendance;
mod blocking;
mod coder;
mod connecting;
mod exchange;
mod lane;
mod layers;
mod link;
mod member;
mod reading;
mod session;
mod tables;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use psjobs_api::Environment;
use psjobs_api::training::Compression;
use tokio::runtime::Runtime;
use tonic::Status;

pub use blocking::Session;
pub use layers::Layers;
pub use member::{AsyncMember, Member};
pub(crate) use reading::Reading;
pub use session::AsyncSession;
pub use tables::{AsyncTables, Pulling, Pushing, RowGradients, Tables};

use self::lane::{connections, cores};
use crate::layout::LayoutError;
pub use crate::layout::TensorSpec;
use crate::network::Network;
use crate::proto;
use crate::retry::WITHOUT_LIMIT;

/// The settings of a trainer's session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The job; servers of another one refuse this trainer.
    pub job_uid: String,
    /// Index among the trainers.
    pub trainer: u32,
    /// How often this trainer was replaced.
    pub incarnation: u32,
    /// `host:port` of every server, in order.
    pub servers: Vec<String>,
    /// The model's parameters, in the order of the flat space.
    pub tensors: Vec<TensorSpec>,
    /// Steps that this trainer is going to do; in an elastic job the batches that all trainers are going to read.
    pub total_steps: u64,
    /// The job is elastic: trainers come and go, and are assigned what they read.
    pub elastic: bool,
    /// How long to wait for a server that does not answer, at the start and after it was lost.
    pub connect_timeout: Duration,
    /// Connections to each server, over which its blocks are dealt, at most 16: more than one where one core for a
    /// connection is the limit. Shared memory needs but one.
    pub connections: u32,
    /// Exchange blocks through shared memory with servers of this host that offer it.
    pub shared_memory: bool,
    /// Servers that hold each block: server k's are also held by server k+1 if it is 2.
    pub replication_factor: u32,
    /// How gradients are coded where they travel.
    pub compression: Compression,
    /// The network that the servers are reached through.
    pub network: Network,
    /// Set, from a signal handler for instance, to give up whatever is being waited for.
    pub interrupt: Arc<AtomicBool>,
}

impl SessionConfig {
    /// The configuration of a trainer in `environment`.
    #[must_use]
    pub fn new(environment: &Environment, tensors: Vec<TensorSpec>, total_steps: u64) -> Self {
        Self {
            job_uid: environment.uid.clone(),
            trainer: environment.index,
            incarnation: environment.incarnation,
            servers: environment.servers.clone(),
            tensors,
            total_steps,
            elastic: environment.min_trainers.is_some(),
            connect_timeout: Self::patience(environment.supervised),
            connections: connections(environment.connections, environment.tls_folder.is_some(), cores()),
            shared_memory: true,
            replication_factor: environment.replication_factor,
            compression: environment.training.compression.clone(),
            network: Network::default(),
            interrupt: Arc::default(),
        }
    }

    /// How long a trainer waits for a server unless it is told otherwise: without limit where somebody starts servers
    /// again (`supervised`), 2 minutes where a person has to notice that one is away.
    #[must_use]
    pub const fn patience(supervised: bool) -> Duration {
        if supervised { WITHOUT_LIMIT } else { Duration::from_secs(120) }
    }

    /// The servers that may lead the blocks of server `shard`.
    pub(crate) fn holders(&self, shard: u32) -> Vec<u32> {
        holders(shard, self.servers.len() as u32, self.replication_factor)
    }

    pub(crate) fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn id(&self) -> proto::TrainerId {
        proto::TrainerId { job_uid: self.job_uid.clone(), index: self.trainer, incarnation: self.incarnation }
    }
}

/// Why a trainer cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The model has no parameters, or too many.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The initial values do not fit the tensors.
    #[error("the model has {tensors} parameters, {values} initial values were given")]
    InitialValues {
        /// Elements of all tensors.
        tensors: usize,
        /// Values given.
        values: usize,
    },
    /// An address that is none.
    #[error("{0:?} is not the address of a server; write host:port")]
    Address(String),
    /// A server did not answer in time.
    #[error("server {address} did not answer for {seconds} s ({reason}); see whether it runs and its port is open")]
    Unreachable {
        /// The server.
        address: String,
        /// How long it was tried.
        seconds: u64,
        /// The reason of the last attempt's failure.
        reason: String,
    },
    /// A server said no, and would say so again.
    #[error("server {address} refused: {reason}")]
    Refused {
        /// The server.
        address: String,
        /// Its words.
        reason: String,
    },
    /// A server refused because of another process: one that has taken this trainer's place, or a server of another
    /// job that has this address now. The trainer may be let in when it is started again.
    #[error("server {address} refused: {reason}")]
    Conflict {
        /// The server.
        address: String,
        /// Its words.
        reason: String,
    },
    /// A server computes another layout; one of the two is of another version or has other settings.
    #[error(
        "server {address} is server {found} of a job with {servers} servers, expected server {want} of {ours}; check the order and number of server addresses"
    )]
    Misplaced {
        /// The server.
        address: String,
        /// Its index.
        found: u32,
        /// Its count of servers.
        servers: u32,
        /// Index expected.
        want: u32,
        /// Count expected.
        ours: u32,
    },
    /// A server has been started again, and has lost its rows or gone to a checkpoint with all others.
    #[error(
        "server {address} was started anew, or has gone to a checkpoint, and has other rows of the sparse tables than \
         before; let the trainers start again, they go on with those"
    )]
    TablesLost {
        /// The server.
        address: String,
    },
    /// No memory for parameters and gradients.
    #[error("cannot get memory for {elements} parameters and their gradients; give this process more memory")]
    Memory {
        /// Number of parameters.
        elements: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// [`SessionConfig::interrupt`] was set.
    #[error("told to stop while waiting for the servers")]
    Interrupted,
    /// No thread or runtime could be had.
    #[error("cannot start the network thread; raise the process limits of this machine")]
    Runtime(#[source] std::io::Error),
}

impl ClientError {
    /// Returns the error of a trainer that `address` refused with a status that is not retryable.
    pub(crate) fn refused(address: &str, status: &Status) -> Self {
        let (address, reason) = (address.to_owned(), status.message().to_owned());
        match status.code() {
            tonic::Code::FailedPrecondition => Self::Conflict { address, reason },
            _ => Self::Refused { address, reason },
        }
    }

    /// Returns true if the trainer was given something that cannot work, so that starting it again cannot help: its
    /// model, flags or environment. A server that is away, another process in its place and a lack of memory are not.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::Layout(_) | Self::InitialValues { .. } | Self::Address(_) | Self::Refused { .. } => true,
            // The addresses of a job are its operator's; a wrong server at one of them is an old one.
            Self::Misplaced { .. }
            | Self::Conflict { .. }
            | Self::Unreachable { .. }
            | Self::TablesLost { .. }
            | Self::Memory { .. }
            | Self::Interrupted
            | Self::Runtime(_) => false,
        }
    }

    /// Returns true if the trainer ends only because a server is away, or was and has lost what it held: it is not to
    /// blame, and goes on when it is started again.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::TablesLost { .. })
    }

    /// Returns true if the cause lies in this trainer, so that the servers should know of it; false if a server, another
    /// process or a signal ended it.
    #[must_use]
    pub fn is_own(&self) -> bool {
        let by_another = matches!(self, Self::Misplaced { .. } | Self::Conflict { .. } | Self::Interrupted);
        !(by_another || self.is_peer_away())
    }
}

/// Returns those of `servers` servers that may lead the blocks of server `shard`, if `copies` hold each block.
fn holders(shard: u32, servers: u32, copies: u32) -> Vec<u32> {
    (0..copies.clamp(1, servers.max(1))).map(|copy| (shard + copy) % servers).collect()
}

/// Returns whether another attempt may succeed.
pub(crate) fn is_retryable(status: &Status) -> bool {
    !matches!(
        status.code(),
        tonic::Code::InvalidArgument | tonic::Code::FailedPrecondition | tonic::Code::Unimplemented
    )
}

/// Starts a runtime that serves a session's connections on `threads` threads.
fn network(threads: usize) -> Result<Runtime, ClientError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name("psjobs-net").enable_all().build().map_err(ClientError::Runtime)
}
