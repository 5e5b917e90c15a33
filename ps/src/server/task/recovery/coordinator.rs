//! The coordinator on server 0: restores every server that starts to one state, requests checkpoints at an interval, and
//! the last checkpoint and the model when training has ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::arrivals::Arrivals;
use super::checkpoint_schedule::{CheckpointSchedule, Kept, When};
use super::client::PAUSE;
use super::destination::{self, Destination};
use super::folder::{FolderError, insist};
use super::folder_lock::FolderLock;
use super::restore_calls::{Answer, RestoreCalls, epochs_of, next_epoch};
use super::server_checkpoint::with_rows;
use super::training_end::training_ended;
use crate::checkpoint::runs::JobIdentity;
use crate::checkpoint::{Checkpoint, CheckpointId, Concluded, Runs};
use crate::proto;
use crate::retry::{Retries, Schedule};
use crate::server::config::CheckpointConfig;
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::recovery::{DurabilityRequest, Newcomer, NotKept};

/// Time after which a trainer that waits for a checkpoint learns why there is none.
const REPORT_AFTER: Duration = Duration::from_secs(20);
/// Timeout for telling the other servers that a new process of server 0 is at work.
const GREETING: Duration = Duration::from_secs(2);
/// Delay before the next attempt at a checkpoint that came too early.
const SOON: Duration = Duration::from_millis(250);

/// Coordinates until `training` ends, from the state that other servers have `given` to this one or from the newest
/// checkpoint, then writes the last checkpoint and the model.
///
/// # Errors
/// If the job cannot go on from its checkpoints, another job or process uses the folder, or the last checkpoint or the
/// model of a job that is done cannot be written.
pub async fn coordinate(
    state: &Arc<ServerState>,
    config: &CheckpointConfig,
    given: bool,
    training: CancellationToken,
) -> Result<(), ServerError> {
    let lock = tokio::select! {
        biased;
        lock = FolderLock::take(state, config) => lock?,
        ended = training_ended(state, &training) => return ended,
    };
    let runs = Runs::new(&config.folder);
    if let Err(error) = config.folder.disk().work(move || runs.remove_left_overs()).await {
        tracing::warn!(%error, "files that were never completed could not be removed from the checkpoint folder");
    }
    let outcome = tokio::select! {
        biased;
        taken = lock.renew() => Err(taken),
        outcome = lead(state, config, given, &training, &lock) => outcome,
    };
    lock.release().await;
    outcome
}

/// Does the work of [`coordinate`] while the `lock` is held.
async fn lead(
    state: &Arc<ServerState>,
    config: &CheckpointConfig,
    given: bool,
    training: &CancellationToken,
    lock: &FolderLock<'_>,
) -> Result<(), ServerError> {
    let mut arrivals = Arrivals::new(state.recovery.arrivals());
    let mut coordinator = Coordinator {
        state,
        config,
        lock,
        runs: Runs::new(&config.folder),
        job: JobIdentity {
            uid: state.config.job_uid.clone(),
            job: config.job.clone(),
            incarnation: config.incarnation,
            resume: config.resume,
            given,
        },
        instances: BTreeMap::new(),
        schedule: CheckpointSchedule::new(state, config, lock),
    };
    let mut conclusions = state.recovery.conclusions();
    // Trainers that wait for a checkpoint of the current state.
    let mut concluding = Vec::new();
    let mut failing_since = None;
    let mut ticks = tokio::time::interval(config.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let has_taken_over = given
        && tokio::select! {
            biased;
            taken = coordinator.take_over() => taken?,
            ended = training_ended(state, training) => return ended,
        };
    let ready = has_taken_over || coordinator.recover_before(training, &mut arrivals).await?;
    if !ready {
        return coordinator.finish(training).await;
    }
    loop {
        tokio::select! {
            biased;
            Some(newcomer) = arrivals.next() => {
                let restored = coordinator.instances.get(&newcomer.server).copied();
                if holds_the_state(&newcomer, restored, state.recovery.whole_epoch()) {
                    coordinator.instances.insert(newcomer.server, newcomer.instance);
                } else {
                    let server = newcomer.server;
                    tracing::warn!("server {server} has started anew; all servers go back to the newest checkpoint");
                    if !coordinator.recover_before(training, &mut arrivals).await? {
                        return coordinator.finish(training).await;
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
                // Dropping a request from before a restore makes its trainer join again.
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
                    // A part that its process before was to write may never come.
                    true = arrivals.wait() => {
                        ticks.reset_immediately();
                        continue;
                    }
                    () = training.cancelled() => break,
                };
                let status = match kept {
                    Ok(is_written) => {
                        // A trainer that has disconnected asks again.
                        for conclusion in concluding.drain(..waiting) {
                            let _ = conclusion.kept.send(Ok(()));
                        }
                        failing_since = None;
                        if is_written {
                            state.recovery.write_succeeded();
                        }
                        continue;
                    }
                    Err(status) => status,
                };
                if status.code() == Code::DataLoss {
                    tracing::warn!(reason = status.message(), "all servers go back to the newest checkpoint");
                    if !coordinator.recover_before(training, &mut arrivals).await? {
                        return coordinator.finish(training).await;
                    }
                    continue;
                }
                if is_of_the_disk(status.code()) {
                    state.recovery.write_failed(status.message(), config.folder.disk().now());
                }
                let early = matches!(status.code(), Code::FailedPrecondition | Code::OutOfRange);
                if early || when == When::Now {
                    ticks.reset_after(SOON);
                }
                if !early {
                    let reason = status.message();
                    tracing::warn!(reason, "no checkpoint was written; training goes on, the next try follows");
                    if when == When::Now && failing_since.get_or_insert_with(Instant::now).elapsed() >= REPORT_AFTER {
                        // They ask again, and are answered again when as much time has passed.
                        failing_since = None;
                        let why = format!("the last step is in no checkpoint yet: {reason}");
                        for conclusion in concluding.drain(..waiting) {
                            let _ = conclusion.kept.send(Err(NotKept { why: why.clone(), given_up: false }));
                        }
                    }
                }
            }
            () = training.cancelled() => break,
        }
    }
    let kept = coordinator.schedule.keep_last().await;
    concluding.retain(|conclusion| conclusion.epoch == state.recovery.epoch());
    // Where training was stopped the trainers join the successors again, which go on from an earlier checkpoint.
    if kept != Ok(true) && !state.members().done() {
        coordinator.schedule.release().await;
        return Ok(());
    }
    for conclusion in concluding {
        let outcome = kept.as_ref().map(drop).map_err(|why| NotKept { why: why.clone(), given_up: true });
        let _ = conclusion.kept.send(outcome);
    }
    if let Err(why) = kept {
        return Err(ServerError::NotKept { what: "the last checkpoint", why });
    }
    coordinator.finish(training).await
}

/// Decides whether a checkpoint failed because of the disk or the store: an operation on it has failed, or was not over in time.
/// Other codes say that it came too early, that a server or the step is away, or that another process leads.
fn is_of_the_disk(code: Code) -> bool {
    matches!(code, Code::Internal | Code::DeadlineExceeded)
}

/// Decides whether a process that asks to be restored holds the state of the others already: it was given all its blocks, or is
/// the process of its server that was `restored`. If this process of server 0 has taken over in `epoch` and restored none,
/// a process that holds a whole state of that epoch has asked since before then.
fn holds_the_state(newcomer: &Newcomer, restored: Option<u64>, epoch: Option<u64>) -> bool {
    match restored {
        // It may have been given the state of a server that had yet to go to the checkpoint of the others.
        _ if newcomer.given && epoch == Some(newcomer.epoch) => true,
        Some(instance) => instance == newcomer.instance,
        None => epoch == Some(newcomer.epoch),
    }
}

struct Coordinator<'a> {
    state: &'a Arc<ServerState>,
    config: &'a CheckpointConfig,
    lock: &'a FolderLock<'a>,
    runs: Runs,
    job: JobIdentity,
    /// The process of each server that holds the current state.
    instances: BTreeMap<u32, u64>,
    schedule: CheckpointSchedule<'a>,
}

impl Coordinator<'_> {
    /// Recovers all servers; returns false if training ends first.
    async fn recover_before(
        &mut self,
        training: &CancellationToken,
        arrivals: &mut Arrivals,
    ) -> Result<bool, ServerError> {
        tokio::select! {
            biased;
            recovered = self.recover(arrivals) => recovered.map(|()| true),
            () = training.cancelled() => Ok(false),
        }
    }

    /// Restores all servers to the newest undamaged checkpoint of the job, waiting for those that do not answer, until others
    /// take their place.
    async fn recover(&mut self, arrivals: &mut Arrivals) -> Result<(), ServerError> {
        let mut rounds = Retries::new(Schedule::every(PAUSE));
        let mut heard = self.state.recovery.greatest_epoch();
        loop {
            self.lock.check().await?;
            self.schedule.settle_before_restore().await;
            let Destination { mut record, lineage, checkpoint, concluded } = self.find().await?;
            let epoch = next_epoch(record.epoch, heard, self.job.incarnation).ok_or_else(|| {
                let text = "a server has an epoch that no job reaches; start all servers of the job again";
                ServerError::Checkpoint(text.to_owned())
            })?;
            // Before a server hears of it, so that the next process of server 0 gives no epoch twice.
            let (runs, run) = (self.runs.clone(), record.run);
            record.epoch = epoch;
            insist(self.state, &self.config.folder, move || Ok(runs.put(&record)?)).await?;
            // A process that takes the folder later finds this epoch, and gives a greater one.
            self.lock.holder().confirm().await?;
            heard = epoch;
            self.schedule.place = Some((run, lineage));
            // Where all have concluded, the others may be done and gone: the model can be written without them.
            self.schedule.kept = checkpoint.map(|_| Kept { extent: None, concluded: concluded.clone(), done: None });
            let place = |id: CheckpointId| proto::CheckpointPlace { run: id.run, step: id.step };
            let (job_uid, checkpoint_place) = (self.job.uid.clone(), checkpoint.map(place));
            let leader = self.state.config.incarnation;
            let request =
                proto::RestoreRequest { job_uid, epoch, checkpoint: checkpoint_place, concluded, run, leader };
            let folder = checkpoint.map(|id| self.runs.path(id));
            let calls = RestoreCalls::new(self.state, &self.config.servers, request, folder);
            let servers = 0..self.config.servers.len() as u32;
            arrivals.take_in();
            let restored = tokio::select! {
                biased;
                restored = try_join_all(servers.map(|server| calls.restore(server))) => restored,
                // A process whose disk hangs may live, and never answer.
                server = arrivals.replacement(|server| calls.asked_for(server)) => {
                    tracing::warn!("server {server} has started anew before it answered; all go to the checkpoint again");
                    continue;
                }
            };
            self.state.recovery.set_trouble(None);
            match restored {
                Ok(answers) => {
                    heard = answers.iter().map(Answer::epoch).max().unwrap_or(0).max(heard);
                    let all = answers.iter().map(Answer::instance).collect::<Option<Vec<_>>>();
                    if let Some(instances) = all {
                        self.instances = (0..).zip(instances).collect();
                        self.instances.iter().for_each(|(server, instance)| arrivals.hear(*server, *instance));
                        self.schedule.hold_newest(answers.iter().filter_map(Answer::extent).collect());
                        return Ok(());
                    }
                    tracing::info!("a server did not answer at once; all go to the checkpoint again, together");
                    rounds.pause().await;
                }
                Err(status) if status.code() == Code::DataLoss => {
                    let (runs, why) = (self.runs.clone(), status.message().to_owned());
                    let set_aside = move || checkpoint.map_or(Ok(()), |id| destination::set_aside(&runs, id, &why));
                    insist(self.state, &self.config.folder, set_aside).await?;
                }
                Err(status) if status.code() == Code::NotFound => {
                    let reason = status.message();
                    tracing::warn!(reason, "all servers go to the newest checkpoint that is left");
                    rounds.pause().await;
                }
                Err(status) => return Err(ServerError::Checkpoint(status.message().to_owned())),
            }
        }
    }

    /// Continues where the previous process stopped. Returns false if that one has begun to lead the servers to a checkpoint:
    /// some servers or trainers may have gone there, and wait for the others.
    async fn take_over(&mut self) -> Result<bool, ServerError> {
        let Destination { record, lineage, checkpoint, concluded } = self.find().await?;
        let (recorded, epoch) = (record.epoch, self.state.recovery.epoch());
        if recorded > epoch {
            tracing::warn!(recorded, epoch, "the servers were on their way to a checkpoint; all go to the newest one");
            self.state.recovery.give_up_takeover();
            return Ok(false);
        }
        if let (Some(id), Some(batch_assignments)) = (checkpoint, &self.state.batch_assignments) {
            let folder = self.runs.path(id);
            let open = move || match Checkpoint::open(&folder) {
                Ok(checkpoint) => Ok(Some(checkpoint.dealt().clone())),
                Err(damage) if damage.is_proved() => Ok(None),
                Err(damage) => Err(FolderError::Wait(damage.to_string())),
            };
            // Trainers say what was assigned since when they ask.
            if let Some(dealt) = insist(self.state, &self.config.folder, open).await? {
                batch_assignments.assigner().restore(dealt);
            }
        }
        // The process before may have said that it writes no more. A server that is away has not ended by that.
        let state = self.state;
        let others =
            self.config.servers.iter().skip(1).map(|address| async move {
                tokio::time::timeout(GREETING, epochs_of(state, address)).await.ok()?.ok()
            });
        let others = join_all(others).await;
        // One whose state is not whole asks to be restored.
        let is_other = |answer: &proto::GetEpochReply| answer.whole_epoch != 0 && answer.whole_epoch != epoch;
        if others.iter().flatten().any(is_other) {
            tracing::warn!(
                epoch,
                "a server did not go to the last checkpoint with the others; all go to the newest one"
            );
            self.state.recovery.give_up_takeover();
            return Ok(false);
        }
        self.state.recovery.set_run(record.run);
        if self.state.config.min_trainers.is_none() {
            self.adopt_steps(&concluded).await;
            self.state.members().adopt_concluded(&concluded);
        }
        self.schedule.place = Some((record.run, lineage));
        if let Some(id) = checkpoint {
            self.schedule.set_newest(id).await;
        }
        Ok(true)
    }

    /// Takes over the steps of trainers that have left the processes before this one, which are in no roster: from the newest
    /// checkpoint, where they have `concluded`, and from the blocks and rows here, as far as these are copied by now.
    async fn adopt_steps(&self, concluded: &Concluded) {
        let all = |trainer| concluded.get(&trainer).copied().unwrap_or(0);
        let of_checkpoint: Vec<u64> = (0..self.state.config.trainers).map(all).collect();
        self.state.members().adopt_steps(&of_checkpoint);
        if let Ok(store) = self.state.store()
            && let Some(steps) = store.next_steps(self.state.config.index).await
        {
            let steps = with_rows(self.state, steps).await;
            self.state.members().adopt_steps(&steps);
        }
    }

    /// Writes the model of a job that is done, although not all servers have gone to its last checkpoint, and lets the others
    /// end.
    async fn finish(&mut self, training: &CancellationToken) -> Result<(), ServerError> {
        if self.schedule.kept.is_none() && self.state.members().done() {
            let found = tokio::select! {
                biased;
                found = self.find() => found?,
                ended = training_ended(self.state, training) => return ended,
            };
            if let Some(id) = found.checkpoint {
                self.schedule.set_newest(id).await;
                self.schedule.kept = Some(Kept { extent: None, concluded: found.concluded, done: None });
            }
        }
        if !self.schedule.is_whole() {
            self.schedule.settle_for_newest().await;
        }
        let exported = self.schedule.export().await;
        self.schedule.release().await;
        exported
    }

    async fn find(&self) -> Result<Destination, ServerError> {
        let own = self.schedule.place.as_ref().map(|(run, _)| *run);
        let (runs, job, trainers) = (self.runs.clone(), self.job.clone(), self.state.config.trainers);
        insist(self.state, &self.config.folder, move || destination::find(&runs, &job, own, trainers)).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn a_server_that_asks_is_restored_unless_it_holds_the_state() {
        for (label, given, its_epoch, restored, epoch, want) in [
            ("it has just started", false, 0, Some(5), Some(3), false),
            ("the others gave it all blocks", true, 3, Some(5), Some(3), true),
            ("another one gave it all blocks before all went to a checkpoint", true, 2, Some(5), Some(3), false),
            ("it was restored", false, 3, Some(7), Some(3), true),
            ("another process than was restored", false, 3, Some(5), Some(3), false),
            ("it has asked since before server 0 took over", false, 3, None, Some(3), true),
            ("it has just started, and server 0 has taken over", false, 0, None, Some(3), false),
            ("its state is of an earlier epoch", false, 2, None, Some(3), false),
            ("neither has a whole state", false, 0, None, None, false),
        ] {
            let newcomer = Newcomer { server: 1, instance: 7, given, epoch: its_epoch, done: oneshot::channel().0 };
            assert_eq!(holds_the_state(&newcomer, restored, epoch), want, "{label}");
        }
    }
}
