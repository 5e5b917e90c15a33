//! The coordinator on server 0: restores every server that starts to one state, requests checkpoints at an interval, and
//! the last checkpoint and the model when training has ended.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use futures::future::try_join_all;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::{Code, ConnectError, Status};

use super::checkpoint_schedule::{CheckpointSchedule, When};
use super::client::client;
use crate::checkpoint::{Catalog, Checkpoint, on_disk};
use crate::network::Network;
use crate::proto;
use crate::retry::{Failure, Schedule, retry};
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::recovery::{DurabilityRequest, LastCheckpoint};

/// Pause between two attempts to reach a server.
const PAUSE: Duration = Duration::from_millis(200);
/// Interval at which the log names a server that does not answer.
const QUIET: Duration = Duration::from_secs(10);
/// Delay before the next attempt at a checkpoint that came too early.
const SOON: Duration = Duration::from_millis(250);
/// Coordinates until `training` ends, from the state that other servers have `given` to this one or from the newest
/// checkpoint, then writes the last checkpoint and the model.
///
/// # Errors
/// If there is a checkpoint that this job cannot go on from: beginning anew would overwrite it.
pub async fn coordinate(
    state: &Arc<ServerState>,
    config: &CheckpointConfig,
    given: bool,
    training: CancellationToken,
) -> Result<(), ServerError> {
    let mut arrivals = state.recovery.arrivals();
    let mut coordinator =
        Coordinator { state, config, instances: BTreeMap::new(), schedule: CheckpointSchedule::new(state, config) };
    let mut conclusions = state.recovery.conclusions();
    // Trainers that wait for a checkpoint of the current state.
    let mut concluding = Vec::new();
    let mut resume = config.resume;
    let mut ticks = tokio::time::interval(config.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if given {
        coordinator.take_over().await;
    } else if !coordinator.recover_before(&training, resume).await? {
        coordinator.schedule.export().await;
        return Ok(());
    }
    loop {
        // What this job has written is always its own to go on from.
        resume |= state.recovery.newest().is_some();
        tokio::select! {
            biased;
            Some(newcomer) = arrivals.recv() => {
                if newcomer.given {
                    coordinator.instances.insert(newcomer.server, newcomer.instance);
                } else if coordinator.instances.get(&newcomer.server) != Some(&newcomer.instance) {
                    let server = newcomer.server;
                    tracing::warn!("server {server} has started anew; all servers go back to the newest checkpoint");
                    if !coordinator.recover_before(&training, resume).await? {
                        coordinator.schedule.export().await;
                        return Ok(());
                    }
                }
                // One that has died meanwhile asks again.
                let _ = newcomer.done.send(());
            }
            Some(conclusion) = conclusions.recv() => {
                concluding.push(conclusion);
                ticks.reset_immediately();
            }
            _ = ticks.tick() => {
                // Dropping a request from before a restore tells its trainer to join again.
                concluding.retain(|conclusion: &DurabilityRequest| conclusion.epoch == state.recovery.epoch());
                let when = if concluding.is_empty() { When::Soon } else { When::Now };
                let waiting = concluding.len();
                let kept = tokio::select! {
                    biased;
                    kept = coordinator.schedule.keep(when) => kept,
                    // The step that was to be kept may never come.
                    Some(conclusion) = conclusions.recv(), if when == When::Soon => {
                        concluding.push(conclusion);
                        ticks.reset_immediately();
                        continue;
                    }
                    () = training.cancelled() => break,
                };
                let Err(status) = kept else {
                    // A trainer that has disconnected asks again.
                    for conclusion in concluding.drain(..waiting) {
                        let _ = conclusion.kept.send(());
                    }
                    continue;
                };
                let early = matches!(status.code(), Code::FailedPrecondition | Code::OutOfRange);
                if early || when == When::Now {
                    ticks.reset_after(SOON);
                }
                if !early {
                    let reason = status.message();
                    tracing::warn!(reason, "no checkpoint was written; training goes on, the next try follows");
                }
            }
            () = training.cancelled() => break,
        }
    }
    coordinator.schedule.keep_last().await;
    coordinator.schedule.export().await;
    coordinator.schedule.release().await;
    Ok(())
}

struct Coordinator<'a> {
    state: &'a Arc<ServerState>,
    config: &'a CheckpointConfig,
    /// The process of each server that holds the current state.
    instances: BTreeMap<u32, u64>,
    schedule: CheckpointSchedule<'a>,
}

impl Coordinator<'_> {
    /// Recovers all servers; returns false if training ends first.
    async fn recover_before(&mut self, training: &CancellationToken, resume: bool) -> Result<bool, ServerError> {
        tokio::select! {
            biased;
            recovered = self.recover(resume) => recovered.map(|()| true),
            () = training.cancelled() => Ok(false),
        }
    }

    /// Restores all servers to the newest undamaged checkpoint, waiting for those that do not answer.
    async fn recover(&mut self, resume: bool) -> Result<(), ServerError> {
        let mut damaged = Vec::new();
        loop {
            let step = if resume { self.newest(&damaged).await } else { None };
            let concluded = self.concluded_in(step).await;
            // Where all have, the others may be done and gone: the model can be written without them.
            self.schedule.kept = step.map(|step| (step, concluded.clone()));
            let (job_uid, epoch) = (self.state.config.job_uid.clone(), new_epoch());
            let request = proto::RestoreRequest { job_uid, epoch, step, concluded };
            let config = &self.state.config;
            let restored =
                (0..).zip(&self.config.servers).map(|(server, address)| {
                    let request = request.clone();
                    async move {
                        restore(&config.network, server, address, request).await.map(|restored| (server, restored))
                    }
                });
            match try_join_all(restored).await {
                Ok(restored) if restored.iter().any(|(_, restored)| restored.epoch != epoch) => {
                    tracing::info!("a server did not answer at once; all go to the checkpoint again, together");
                }
                Ok(restored) => {
                    self.instances =
                        restored.into_iter().map(|(server, restored)| (server, restored.instance)).collect();
                    return Ok(());
                }
                Err(status) if status.code() == Code::InvalidArgument => {
                    return Err(ServerError::Checkpoint(status.message().to_owned()));
                }
                Err(status) => {
                    tracing::error!(reason = status.message(), "a checkpoint cannot be used; trying the one before");
                    damaged.extend(step);
                }
            }
        }
    }

    /// Continues where the previous process stopped.
    async fn take_over(&mut self) {
        if let Some(step) = self.newest(&[]).await {
            let path = Catalog::new(&self.config.folder).path(step);
            self.state.recovery.set_newest(on_disk(move || LastCheckpoint::complete(step, path)).await);
        }
    }

    /// Step of the newest complete checkpoint that is not in `damaged`. Whether it is whole its readers
    /// find out.
    async fn newest(&self, damaged: &[u64]) -> Option<u64> {
        let catalog = Catalog::new(&self.config.folder);
        let complete = on_disk(move || {
            catalog.complete().inspect_err(
                |error| tracing::error!(%error, folder = %catalog.folder().display(), "cannot look for checkpoints"),
            )
        });
        complete.await.unwrap_or_default().into_iter().rev().find(|step| !damaged.contains(step))
    }

    /// The trainers that had given all when the checkpoint of `step` was taken. A job that goes on from another one's
    /// checkpoint has work for all of its own. One that cannot be read is found to be damaged by who restores it.
    async fn concluded_in(&self, step: Option<u64>) -> Vec<u32> {
        let Some(step) = step else { return Vec::new() };
        let folder = Catalog::new(&self.config.folder).path(step);
        let uid = self.state.config.job_uid.clone();
        let concluded = on_disk(move || {
            let checkpoint = Checkpoint::open(&folder).ok().filter(|checkpoint| checkpoint.description().job == uid);
            checkpoint.map(|checkpoint| checkpoint.concluded().to_vec())
        });
        concluded.await.unwrap_or_default()
    }
}

/// A server that has restored the checkpoint.
struct Restored {
    instance: u64,
    epoch: u64,
}

/// Restores one server, waiting for it if it is away. If it may have been restored before its answer got lost, trainers may
/// have begun there: a process that has taken its place since must not be taken for it, and gets an epoch of its own.
async fn restore(
    network: &Network,
    server: u32,
    address: &str,
    request: proto::RestoreRequest,
) -> Result<Restored, Status> {
    let doubtful = AtomicBool::new(false);
    retry_until_ok(&format!("server {server}"), || {
        let epoch = if doubtful.load(Relaxed) { new_epoch() } else { request.epoch };
        let (request, doubtful) = (proto::RestoreRequest { epoch, ..request.clone() }, &doubtful);
        async move {
            match client(network, address)?.restore(request).await {
                Ok(reply) => Ok(Ok(Restored { instance: reply.into_inner().instance, epoch })),
                Err(status) if is_final(&status) => Ok(Err(status)),
                Err(status) => {
                    doubtful.fetch_or(!never_sent(&status), Relaxed);
                    Err(status)
                }
            }
        }
    })
    .await
}

/// Greater than every one before, of this process and of those that led before it.
fn new_epoch() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |age| age.as_micros() as u64)
}

/// Returns whether a request was never sent because there was no connection.
fn never_sent(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<ConnectError>())
}

/// Returns whether a repeated request would fail in the same way.
fn is_final(status: &Status) -> bool {
    matches!(status.code(), Code::DataLoss | Code::InvalidArgument)
}

/// Repeats `attempt` until it succeeds.
pub(super) async fn retry_until_ok<T, F: Future<Output = Result<T, Status>>>(who: &str, attempt: impl Fn() -> F) -> T {
    let mut logged = Duration::ZERO;
    loop {
        let attempt = || {
            let tried = attempt();
            async move { tried.await.map_err(Failure::<Infallible, Status>::Transient) }
        };
        let log = |status: &Status, elapsed| {
            if elapsed >= logged + QUIET {
                tracing::info!(reason = status.message(), "waiting for {who}");
                logged = elapsed;
            }
        };
        // Without a limit it ends only by success.
        if let Ok(answer) = retry(Schedule::every(PAUSE), pending(), attempt, log).await {
            return answer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_to_nobody_was_never_sent() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a port");
        let mut client = client(&Network::default(), &closed.to_string()).expect("an address");
        let status = client.restore(proto::RestoreRequest::default()).await.expect_err("nobody listens");
        assert!(never_sent(&status), "{status:?}");
        assert!(!never_sent(&Status::unavailable("the connection broke")));
    }
}
