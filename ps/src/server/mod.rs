//! The parameter server process: takes a bound listener and runs until every trainer has left, or
//! it is told to stop. `coordination` and `exchange` are the services, `membership` knows the
//! trainers, `store` and `block` hold the parameters, `tables` serves what `crate::sparse` holds.

mod coordination;
mod dealing;
mod evaluation;
mod exchange;
mod membership;
mod metrics;
mod pace;
mod recovery;
mod replication;
mod service;
mod shared;
mod streams;
mod tables;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::{Environment, ReplicaResult, Training};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Connected;

pub use evaluation::{Evaluation, Measurement};
use membership::News;
pub use membership::Patience;
pub use recovery::CheckpointConfig;

use crate::clock::now;
use crate::network::{Network, ServeError};
use crate::proto;
use proto::coordination_server::CoordinationServer;
use proto::recovery_server::RecoveryServer;
use service::Service;
use shared::Shared;

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
    pub patience: Patience,
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
            patience: Patience::default(),
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

/// Why a server ended before its work was done.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The services broke, or could not begin.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The descriptors that are part of this program are damaged.
    #[error("gRPC reflection cannot be served")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The job cannot be elastic.
    #[error("{0}")]
    Elastic(&'static str),
    /// Nobody is left to train.
    #[error("gave up: {0}; see their logs, then start the job again")]
    Abandoned(String),
    /// The checkpoint folder holds another job's state.
    #[error("{0}")]
    Checkpoint(String),
    /// The other server that held blocks of this one ended before this one had all of them.
    #[error(
        "the blocks of server {shard} are lost: server {other} ended before this one had copied them; started again, \
         the servers go back to a checkpoint or are filled with a trainer's parameters"
    )]
    Lost {
        /// The server that the blocks are named after.
        shard: u32,
        /// The one that ended.
        other: u32,
    },
    /// It was told to stop before every trainer had finished.
    #[error("stopped before all trainers had finished")]
    Stopped,
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

/// How often the server looks for trainers that are missing.
const LOOK: Duration = Duration::from_secs(1);
/// How long open connections may take to close at the end.
const DRAIN: Duration = Duration::from_secs(5);
/// How long trainers may take to leave after the server was told to stop.
const GOODBYE: Duration = Duration::from_secs(8);
/// Receive window of one stream: several blocks, so that a trainer never waits for a window update.
const WINDOW: u32 = 4 * 1024 * 1024;

/// Serves on `listener` until all trainers have left well, or `shutdown` resolves.
///
/// # Errors
/// If the service breaks, the trainers abandon the server, or it is stopped early.
pub async fn run(
    listener: TcpListener,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<ReplicaResult, ServerError> {
    let incoming = TcpListenerStream::new(listener).map(|stream| {
        // Answers are written whole; waiting to fill packets would only delay them.
        stream.inspect(|stream| drop(stream.set_nodelay(true)))
    });
    run_on(incoming, config, shutdown).await
}

/// As [`run`], on connections from wherever they come.
///
/// # Errors
/// As [`run`].
pub async fn run_on<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
    incoming: impl Stream<Item = io::Result<S>>,
    mut config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<ReplicaResult, ServerError> {
    if config.min_trainers.is_some()
        && let Some(why) = inelastic(&config.training)
    {
        return Err(ServerError::Elastic(why));
    }
    let metrics = config.metrics.take();
    let stop = config.ending.clone();
    let services = std::mem::take(&mut config.services);
    let evaluation = config.evaluation.take();
    let shared = Shared::new(config);
    let stopped = |stop: &CancellationToken| stop.clone().cancelled_owned();
    if let Some(listener) = metrics {
        let (shared, stop) = (shared.clone(), stopped(&stop));
        tokio::spawn(async move {
            if let Err(error) = metrics::serve(listener, shared, stop).await {
                tracing::warn!(%error, "the metrics service ended");
            }
        });
    }
    let evaluating = evaluation.map(|evaluation| {
        shared.members().expect_model(evaluation.tensors());
        let shared = shared.clone();
        AbortOnDropHandle::new(tokio::spawn(async move { evaluation::run(&shared, evaluation).await }))
    });
    let serving = serve_grpc(incoming, &shared, services, stopped(&stop));
    let replicating = shared.clone();
    let mut replicating = AbortOnDropHandle::new(tokio::spawn(async move { replication::run(&replicating).await }));
    let training_over = CancellationToken::new();
    let recovering = recovery::run(&shared, training_over.clone());
    tokio::pin!(serving, recovering);
    let mut kept = false;
    let ended = async {
        tokio::select! {
            biased;
            () = shared.done.notified() => Ok(()),
            why = abandoned(&shared) => Err(ServerError::Abandoned(why)),
            Ok(lost) = &mut replicating => Err(lost),
            () = shutdown => {
                goodbye(&shared).await;
                // Whoever is started in its place would wait for trainers that are done.
                if shared.members().done() && shared.decides_the_end() { Ok(()) } else { Err(ServerError::Stopped) }
            }
        }
    };
    tokio::pin!(ended);
    let outcome = loop {
        tokio::select! {
            biased;
            served = &mut serving => return served.and(Err(ServerError::Stopped)),
            recovered = &mut recovering, if !kept => match recovered {
                Ok(()) => kept = true,
                Err(error) => break Err(error),
            },
            outcome = &mut ended => break outcome,
        }
    };
    if outcome.is_ok() {
        shared.members().close();
    }
    training_over.cancel();
    drop(evaluating);
    if !kept && !matches!(outcome, Err(ServerError::Checkpoint(_))) {
        tokio::select! {
            biased;
            served = &mut serving => return served.and(Err(ServerError::Stopped)),
            recovered = &mut recovering => recovered?,
        }
    }
    stop.cancel();
    shared.close_streams();
    if tokio::time::timeout(DRAIN, serving).await.is_err() {
        tracing::debug!("closed connections that trainers kept open");
    }
    outcome.map(|()| {
        let mut result = shared.recovery.add_to(shared.members().result());
        if let Some(dealing) = &shared.dealing {
            result.steps = dealing.dealer().done();
        }
        tracing::info!(steps = result.steps, examples = result.examples, "every trainer has left; done");
        result
    })
}

async fn serve_grpc<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
    incoming: impl Stream<Item = io::Result<S>>,
    shared: &Arc<Shared>,
    services: Routes,
    stop: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<CoordinationServer<coordination::Coordination>>().await;
    health.set_serving::<Service<exchange::Training>>().await;
    let reflection =
        || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(proto::DESCRIPTORS);
    let router = Server::builder()
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_frame_size(crate::wire::MAX_FRAME)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_routes(services)
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(ServerError::Reflection)?)
        // What clients of other languages still ask for.
        .add_service(reflection().build_v1alpha().map_err(ServerError::Reflection)?)
        .add_service(Service::new(replication::Replicating, shared))
        .add_service(RecoveryServer::new(recovery::Service(shared.clone())))
        .add_service(CoordinationServer::new(coordination::Coordination(shared.clone())))
        .add_service(tables::service(shared.clone()))
        .add_service(Service::new(exchange::Training, shared));
    Ok(shared.config.network.serve(router, incoming, stop).await?)
}

/// Waits, not long, for the trainers to end their steps and leave: then the last checkpoint holds whole
/// steps.
async fn goodbye(shared: &Shared) {
    if shared.config.checkpoint.is_none() {
        return;
    }
    let all_left = async {
        loop {
            let left = shared.left.notified();
            if !shared.members().active() {
                return;
            }
            left.await;
        }
    };
    if tokio::time::timeout(GOODBYE, all_left).await.is_err() {
        tracing::warn!("trainers are still at work; keeping what they have given so far");
    }
}

/// Names missing trainers as time passes; resolves when the server should give up.
async fn abandoned(shared: &Shared) -> String {
    let mut ticks = tokio::time::interval(LOOK);
    loop {
        ticks.tick().await;
        let now = now();
        let (finished, news, done, why) = {
            let mut members = shared.members();
            let (finished, news) = (members.presume_finished(now), members.look(now));
            let done = members.done() && shared.decides_the_end();
            (finished, news, done, members.abandoned(now).filter(|_| !done))
        };
        for trainer in &finished {
            tracing::info!(trainer, "gave all its steps and is gone; taken for finished");
            shared.finish(*trainer).await;
        }
        let elastic = shared.config.min_trainers.is_some();
        for News { trainer, is_lost, sentence } in news {
            tracing::warn!("{sentence}");
            match (is_lost, elastic) {
                (true, true) => shared.part(trainer, &Status::aborted(sentence)).await,
                (true, false) => shared.disconnect(trainer, &Status::aborted(sentence)),
                (false, _) => {}
            }
        }
        if done && (elastic || !finished.is_empty()) {
            shared.done.notify_one();
        }
        if let Some(why) = why {
            return why;
        }
    }
}
