//! Keeps the state of a job when servers are lost. Every server writes its own part of a checkpoint and restores it
//! ([`server_checkpoint`]); server 0 is the [`coordinator`]: it decides when all servers write ([`checkpoint_schedule`])
//! and what they restore, so that they always hold one state. Without a checkpoint folder none of this runs, and a
//! trainer's parameters fill a restarted server.

mod arrivals;
mod checkpoint_schedule;
pub(super) mod client;
mod confirmed_commit;
mod coordinator;
mod destination;
mod error;
mod extent;
mod folder;
mod folder_lock;
mod part_limits;
mod restore_calls;
pub mod server_checkpoint;
mod training_end;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock::now;
use crate::proto;
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;

use client::retry_until_ok;
use coordinator::coordinate;
use training_end::{LAST, training_ended};

/// Interval at which a server without trainers checks whether the job is done.
const LOOK: Duration = Duration::from_secs(5);

/// Runs this server's part in recovery until the last checkpoint, that of the end of `training`, is written.
///
/// # Errors
/// On server 0: if the job cannot go on from its checkpoints, another job or process uses the folder, or the last
/// checkpoint or the model cannot be written.
pub async fn run(state: &Arc<ServerState>, training: CancellationToken) -> Result<(), ServerError> {
    let Some(config) = &state.config.checkpoint else { return Ok(()) };
    let given = match &state.replication {
        Some(replication) => tokio::select! {
            biased;
            given = replication.settled() => given,
            ended = training_ended(state, &training) => return ended,
            // The others have ended after the last checkpoint, so that none says who leads: the model is left to write.
            () = wait_for_whole(state, config), if state.config.index == 0 => false,
            () = wait_for_job_end(state, config), if state.config.index != 0 => {
                tracing::info!("the last checkpoint has every step of every trainer, and the other servers have ended; done");
                state.done.notify_one();
                return Ok(());
            }
        },
        None => false,
    };
    if given {
        state.recovery.set_taken_over();
    }
    if state.config.index == 0 {
        return coordinate(state, config, given, training).await;
    }
    let training_ends = async {
        tokio::select! {
            biased;
            () = training.cancelled() => {}
            () = follow(state, config, given) => training.cancelled().await,
        }
    };
    tokio::select! {
        biased;
        () = training_ends => {}
        () = state.recovery.ended.notified(), if !state.decides_the_end() => {
            state.done.notify_one();
            return Ok(());
        }
        () = wait_for_job_end(state, config) => {
            tracing::info!("the last checkpoint has every step of every trainer; done");
            state.done.notify_one();
            return Ok(());
        }
    }
    if !hears_of_the_last(state).await {
        tracing::warn!("server 0 did not say in time that it has the last checkpoint; the one before may stay");
    }
    Ok(())
}

/// Waits until server 0 says that it writes no more checkpoints; false if it does not say so in time. While server 0 waits for a
/// part that is being written here, this server waits, too, for one part.
async fn hears_of_the_last(state: &ServerState) -> bool {
    let mut last_written = state.recovery.last_written.subscribe();
    let heard = last_written.wait_for(|written| *written);
    tokio::pin!(heard);
    if tokio::time::timeout(LAST, &mut heard).await.is_ok() {
        return true;
    }
    if state.recovery.awaited.try_write().is_ok() {
        return false;
    }
    tokio::select! {
        biased;
        _ = &mut heard => return true,
        _ = state.recovery.awaited.write() => {}
    }
    tokio::time::timeout(LAST, &mut heard).await.is_ok()
}

/// Asks server 0, until it succeeds, to restore this server to the state of the others.
async fn follow(state: &ServerState, config: &CheckpointConfig, given: bool) {
    let (recovery, server) = (&state.recovery, state.config.index);
    let (job_uid, instance) = (state.config.job_uid.clone(), recovery.instance);
    let request = proto::RecoverRequest { job_uid, server, instance, given, epoch: 0 };
    retry_until_ok("server 0", || async {
        let mut client = client::client(&state.config.network, &config.servers[0])?;
        let epoch = recovery.whole_epoch().unwrap_or(0);
        client.recover(proto::RecoverRequest { epoch, ..request.clone() }).await.map(drop)
    })
    .await;
}

/// Polls until the newest checkpoint has every step of every trainer.
async fn wait_for_whole(state: &ServerState, config: &CheckpointConfig) {
    loop {
        tokio::time::sleep(LOOK).await;
        if server_checkpoint::whole(state, config).await.is_some() {
            return;
        }
    }
}

/// Polls until the final checkpoint is complete and no trainer has been active for the silence timeout. A server that
/// missed the end-of-job message ends this way.
async fn wait_for_job_end(state: &ServerState, config: &CheckpointConfig) {
    let mut quiet = Instant::now();
    loop {
        tokio::time::sleep(LOOK).await;
        if state.members().active() {
            quiet = Instant::now();
        } else if quiet.elapsed() >= state.config.timeouts.silence
            && let Some((steps, trainers)) = server_checkpoint::whole(state, config).await
        {
            let mut members = state.members();
            members.rewind(&steps, &trainers, now());
            members.finish_durable();
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::checkpoint::CheckpointPolicy;
    use psjobs_api::env::Checkpoint;
    use psjobs_api::{Environment, Training};

    use super::*;
    use crate::server::config::ServerConfig;

    fn state() -> Arc<ServerState> {
        let environment = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 1, Training::default());
        ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) })
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_does_not_end_while_it_writes_its_part_of_the_last_checkpoint() {
        let state = state();
        let server_0 = async {
            let part = state.recovery.awaited.read().await;
            tokio::time::sleep(3 * LAST + LOOK).await;
            drop(part);
            tokio::time::sleep(LOOK).await;
            state.recovery.last_written.send_replace(true);
        };
        let (has_heard, ()) = tokio::join!(hears_of_the_last(&state), server_0);
        assert!(has_heard);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_writes_nothing_waits_no_longer_for_server_0() {
        let began = Instant::now();
        assert!(!hears_of_the_last(&state()).await);
        assert!((LAST..LAST + LOOK).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_trainer_that_joins_waits_for_the_restore() {
        let plain = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 1, Training::default());
        let checkpoint = Some(Checkpoint { folder: "/checkpoints".into(), policy: CheckpointPolicy::default() });
        let kept = Environment { checkpoint, ..plain };
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&kept) });
        let began = Instant::now();
        let refused = state.epoch_when_whole().await;
        assert!(refused.is_err() && began.elapsed() >= Duration::from_secs(5), "{:?}", began.elapsed());
        let (began, restore) = (Instant::now(), async {
            tokio::time::sleep(LOOK).await;
            state.recovery.set_epoch(3);
            state.recovery.set_whole();
        });
        let (joined, ()) = tokio::join!(state.epoch_when_whole(), restore);
        assert_eq!((joined.expect("is let in"), began.elapsed()), (3, LOOK));
    }
}
