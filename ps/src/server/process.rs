//! The server process: starts the services and tasks, waits for the end of training and shuts down in order.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use psjobs_api::ReplicaResult;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::config::{Evaluation, ServerConfig, inelastic};
use super::error::ServerError;
use super::service::coordination::Coordination;
use super::service::exchange::ParameterServer;
use super::service::first_call::FirstCallLimit;
use super::service::frame_service::FrameService;
use super::service::servers_only::ServersOnly;
use super::service::{metrics, recovery as recovery_service, replication as replication_service, sparse_tables};
use super::state::ServerState;
use super::task::{evaluation, liveness, recovery, replication, series, successor};
use crate::counted_stream::{Counted, Counter};
use crate::owner_tasks::Owned;
use crate::{network, open_files, proto, wire};
use proto::coordination_server::CoordinationServer;
use proto::recovery_server::RecoveryServer;

/// How long open connections may take to close at the end.
const DRAIN: Duration = Duration::from_secs(5);
/// Receive window of one stream: several blocks, so that a trainer never waits for a window update.
const WINDOW: u32 = 4 * 1024 * 1024;

/// Serves on `listener` until all trainers have left well, or `shutdown` resolves. Raises the limit of this process' open files
/// as far as it may.
///
/// # Errors
/// If the service breaks, the trainers abandon the server, or it is stopped early.
pub async fn run(
    listener: TcpListener,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<ReplicaResult, ServerError> {
    let writes_series = config.index == 0 && (config.series.is_some() || config.checkpoint.is_some());
    let files = open_files::of_trainers(config.trainers, writes_series);
    if let Some(warning) = open_files::too_few(open_files::raise_limit(), files) {
        tracing::warn!("{warning}");
    }
    let failures = Arc::<AtomicU64>::default();
    let accepted = TcpListenerStream::new(listener)
        .then(move |accepted| open_files::pause_without_files(accepted, failures.clone()));
    let counter = Arc::<Counter>::default();
    let counted = counter.clone();
    let incoming = accepted
        .map(move |stream| stream.inspect(network::prepare).map(|stream| Counted::new(stream, counted.clone())));
    let result = run_on(incoming, config, shutdown).await?;
    Ok(ReplicaResult { traffic: Some(counter.traffic()), ..result })
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
    let parts = Parts {
        metrics: config.metrics.take(),
        services: std::mem::take(&mut config.services),
        evaluation: config.evaluation.take(),
    };
    run_state(incoming, &ServerState::new(config), parts, shutdown).await
}

/// The listener and services beside those of every server.
#[derive(Default)]
struct Parts {
    metrics: Option<TcpListener>,
    services: Routes,
    evaluation: Option<Evaluation>,
}

/// Runs the server of `state`.
async fn run_state<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
    incoming: impl Stream<Item = io::Result<S>>,
    state: &Arc<ServerState>,
    parts: Parts,
    shutdown: impl Future<Output = ()>,
) -> Result<ReplicaResult, ServerError> {
    let Parts { metrics, services, evaluation } = parts;
    let stop = state.config.ending.clone();
    let stopped = |stop: &CancellationToken| stop.clone().cancelled_owned();
    let is_asked = metrics.is_some();
    if let Some(listener) = metrics {
        let (state, stop) = (state.clone(), stopped(&stop));
        tokio::spawn(async move {
            if let Err(error) = metrics::serve(listener, state, stop).await {
                tracing::warn!(%error, "the metrics service ended");
            }
        });
    }
    let evaluating = evaluation.map(|evaluation| {
        state.members().expect_model(evaluation.tensors());
        let state = state.clone();
        AbortOnDropHandle::new(tokio::spawn(async move { evaluation::run(&state, evaluation).await }))
    });
    let serving = serve_grpc(incoming, state, services, stopped(&stop));
    let replicating = state.clone();
    let replicating = async move { replication::run(&replicating).await };
    let mut replicating = AbortOnDropHandle::new(tokio::spawn(state.owners.watched(Owned::Roles, replicating)));
    let series_over = CancellationToken::new();
    let mut series = AbortOnDropHandle::new(tokio::spawn(series::run(state.clone(), is_asked, series_over.clone())));
    let training_over = CancellationToken::new();
    let recovering = recovery::run(state, training_over.clone());
    tokio::pin!(serving, recovering);
    let mut kept = false;
    let ended = async {
        tokio::select! {
            biased;
            () = state.done.notified() => Ok(()),
            why = liveness::given_up(state) => Err(why),
            Ok(Some(lost)) = &mut replicating => Err(lost),
            replaced = successor::found(state) => Err(replaced),
            () = shutdown => {
                liveness::wait_for_leaving(state).await;
                // A successor would wait for trainers that are done.
                if state.members().done() && state.decides_the_end() { Ok(()) } else { Err(ServerError::Stopped) }
            }
        }
    };
    tokio::pin!(ended);
    let mut outcome = loop {
        tokio::select! {
            biased;
            served = &mut serving => return served.and(Err(ServerError::Stopped)),
            recovered = &mut recovering, if !kept => match recovered {
                Ok(()) => kept = true,
                Err(error) => {
                    kept = true;
                    break Err(error);
                }
            },
            // Nothing of this server can be kept.
            panicked = state.owners.panicked() => return Err(panicked.into()),
            outcome = &mut ended => break outcome,
        }
    };
    if outcome.is_ok() {
        state.members().close();
    }
    training_over.cancel();
    drop(evaluating);
    if !kept {
        tokio::select! {
            biased;
            served = &mut serving => return served.and(Err(ServerError::Stopped)),
            panicked = state.owners.panicked() => return Err(panicked.into()),
            recovered = &mut recovering => outcome = recovered.and(outcome),
        }
    }
    stop.cancel();
    state.close_streams();
    series_over.cancel();
    let (served, written) =
        tokio::join!(tokio::time::timeout(DRAIN, serving), tokio::time::timeout(DRAIN, &mut series));
    if served.is_err() {
        tracing::debug!("closed connections that trainers kept open");
    }
    if written.is_err() {
        tracing::warn!("the last metrics are not written, because the disk does not answer");
    }
    outcome.map(|()| {
        let mut result = state.recovery.add_to(state.members().result());
        if let Some(batch_assignments) = &state.batch_assignments {
            result.steps = batch_assignments.assigner().done();
        }
        result.steps *= state.config.training.steps_per_exchange();
        tracing::info!(steps = result.steps, examples = result.examples, "every trainer has left; done");
        result
    })
}

async fn serve_grpc<S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>(
    incoming: impl Stream<Item = io::Result<S>>,
    state: &Arc<ServerState>,
    services: Routes,
    stop: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<CoordinationServer<Coordination>>().await;
    health.set_serving::<FrameService<ParameterServer>>().await;
    let reflection =
        || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(proto::DESCRIPTORS);
    let network = &state.config.network;
    let router = network::limited(Server::builder())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .add_routes(services)
        .add_service(FirstCallLimit::new(health_service, state))
        .add_service(FirstCallLimit::streaming(
            reflection()
                .build_v1()
                .map_err(ServerError::Reflection)?
                .max_decoding_message_size(wire::MAX_FIRST_MESSAGE),
            state,
        ))
        // The older version of reflection: clients of other languages still ask for it.
        .add_service(FirstCallLimit::streaming(
            reflection()
                .build_v1alpha()
                .map_err(ServerError::Reflection)?
                .max_decoding_message_size(wire::MAX_FIRST_MESSAGE),
            state,
        ))
        .add_service(InterceptedService::new(
            FrameService::new(replication_service::Replicating, state),
            ServersOnly::new("replication", network),
        ))
        .add_service(FirstCallLimit::new(
            RecoveryServer::with_interceptor(
                recovery_service::Service(state.clone()),
                ServersOnly::new("recovery", network),
            ),
            state,
        ))
        .add_service(FirstCallLimit::new(CoordinationServer::new(Coordination(state.clone())), state))
        .add_service(FirstCallLimit::new(sparse_tables::service(state.clone()), state))
        .add_service(FrameService::new(ParameterServer, state));
    let processes = state.config.trainers.saturating_add(state.config.servers);
    Ok(network.serve(router, incoming, processes, stop).await?)
}

#[cfg(test)]
mod tests {
    use psjobs_api::{Environment, Training};
    use tokio::io::DuplexStream;

    use super::*;

    #[tokio::test]
    async fn a_server_ends_when_the_task_of_a_block_panics() {
        let environment = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 1, Training::default());
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) });
        state.owners.spawn(Owned::Block(7), async { panic!("a slot is missing") });
        let no_connections = tokio_stream::pending::<io::Result<DuplexStream>>();
        let ended = run_state(no_connections, &state, Parts::default(), std::future::pending());
        let ended = tokio::time::timeout(Duration::from_secs(30), ended).await.expect("it does not stay");
        let sentence = ended.expect_err("it has lost a block").to_string();
        assert!(
            sentence.starts_with("the task of block 7 panicked (a slot is missing), so that this server"),
            "{sentence}"
        );
    }
}
