//! Watches the trainers: logs and detaches lost ones, and decides when the server should give up.

use std::time::Duration;

use tonic::Status;

use crate::clock::now;
use crate::retry::LOG_INTERVAL;
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::membership::{CHECK_INTERVAL, LivenessEvent};

/// How long trainers may take to leave after the server received the signal to stop.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(8);

/// Waits a short time for the trainers to finish their steps and leave, so that the last checkpoint holds whole steps.
pub async fn wait_for_leaving(state: &ServerState) {
    if state.config.checkpoint.is_none() {
        return;
    }
    let all_left = async {
        loop {
            let left = state.left.notified();
            if !state.members().active() {
                return;
            }
            left.await;
        }
    };
    if tokio::time::timeout(LEAVE_TIMEOUT, all_left).await.is_err() {
        tracing::warn!("trainers are still at work; keeping what they have given so far");
    }
}

/// Logs missing trainers and detaches lost ones. Resolves with the reason when the server should give up.
pub async fn given_up(state: &ServerState) -> ServerError {
    let (supervised, elastic) = (state.config.supervised, state.config.min_trainers.is_some());
    // A trainer that failed after its last step is started again and needs the parameters, which only checkpoints keep
    // beyond this server's end. If instead its Leave was lost, the supervisor sees its end and then stops this server.
    let presumes = !supervised || state.config.checkpoint.is_some();
    let mut ticks = tokio::time::interval(CHECK_INTERVAL);
    let mut due = LOG_INTERVAL;
    loop {
        ticks.tick().await;
        let now = now();
        let (finished, news, done, alone, why, failed) = {
            let mut members = state.members();
            members.begin_check(now);
            // A server without the job's state cannot end it: it has neither the steps nor the last checkpoint.
            let mut finished = Vec::new();
            if state.has_state() {
                finished = members.finish_ended();
                if presumes {
                    finished.extend(members.presume_finished(now));
                }
            }
            let news = members.look(now);
            let done = members.done() && state.decides_the_end();
            if done && (elastic || !finished.is_empty()) {
                state.end_if_done(&mut members);
            }
            (finished, news, done, members.alone(now), members.abandoned(now), members.failed())
        };
        for trainer in &finished {
            tracing::info!(trainer, "gave all its steps and is gone; it has finished");
            // It may have been dealt more since, where the servers went back to a checkpoint after its last step.
            state.batch_assignments.iter().for_each(|assignments| assignments.assigner().give_back(*trainer));
            state.finish(*trainer).await;
        }
        for LivenessEvent { trainer, is_lost, sentence } in news {
            tracing::warn!("{sentence}");
            match (is_lost, elastic) {
                (true, true) => state.part(trainer, &Status::aborted(sentence)).await,
                (true, false) => state.disconnect(trainer, &Status::aborted(sentence)),
                (false, _) => {}
            }
        }
        if done {
            continue;
        }
        if let Some(why) = failed.filter(|_| !supervised) {
            // The others learn the cause, and do not look for this server until their time is over.
            let status = Status::failed_precondition(format!("the servers end: {why}"));
            (0..state.config.trainers).for_each(|trainer| state.disconnect(trainer, &status));
            return ServerError::TrainerFailed(why);
        }
        if let Some(why) = why {
            return ServerError::Abandoned(why);
        }
        match alone {
            Some((since, why)) if since >= due => {
                tracing::info!("waiting for trainers: {why}");
                due = since + LOG_INTERVAL;
            }
            Some(_) => {}
            None => due = LOG_INTERVAL,
        }
    }
}
