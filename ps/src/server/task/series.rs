//! Writes the series of the job on server 0: the points of trainers as they come, and every few seconds what the server
//! measures itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use psjobs_api::Training;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{Folder, Runs};
use crate::clock::unix_seconds;
use crate::proto;
use crate::schedule::Schedule;
use crate::series::event_file::Point;
use crate::series::writer::{Entry, SeriesWriter};
use crate::series::{IN_RUN, Source};
use crate::server::service::coordination;
use crate::server::state::ServerState;
use crate::server::state::series::Piece;

/// Interval at which what was written is made durable, and this server measures.
const INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the folder is tried again that could not be written, and the run looked for.
const PAUSE: Duration = Duration::from_secs(1);
/// Interval at which the log repeats that the series cannot be written.
const QUIET: Duration = Duration::from_secs(60);
/// Pieces that are written at once.
const AT_ONCE: usize = 16;

/// Writes until `stop`, then what has come until then. Without a folder it keeps what is measured in memory, if a page can ask for
/// that (`is_asked`).
pub async fn run(state: Arc<ServerState>, is_asked: bool, stop: CancellationToken) {
    let Some(pieces) = state.series.as_ref().and_then(|series| series.pieces()) else {
        if is_asked && state.config.index == 0 {
            stop.run_until_cancelled(remember(state)).await;
        }
        return;
    };
    let known = async {
        loop {
            if let Some(folder) = folder(&state) {
                return folder;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let Some(folder) = stop.run_until_cancelled(known).await else { return };
    let writer = Arc::new(Mutex::new(SeriesWriter::new(folder.clone(), state.recovery.instance)));
    Task::new(state, folder, writer).run(pieces, stop).await;
}

/// Returns the folder of the series, if there is one; with checkpoints when the run is known.
pub fn folder(state: &ServerState) -> Option<Folder> {
    state.series.as_ref()?;
    if let Some(folder) = &state.config.series {
        return Some(folder.clone());
    }
    let (checkpoint, run) = (state.config.checkpoint.as_ref()?, state.recovery.run()?);
    Some(Runs::new(&checkpoint.folder).catalog(run).folder().folder(IN_RUN))
}

/// Keeps in memory what is measured, and what the trainers report.
async fn remember(state: Arc<ServerState>) {
    let (mut measuring, mut ticks) = (Measuring::new(state.clone()), ticks());
    loop {
        ticks.tick().await;
        let pieces = measuring.with_trainers();
        state.past.take(pieces).await;
    }
}

/// Returns what the trainers of `status` report as points of their series.
fn reported(status: &proto::StatusReply, unix_seconds: f64) -> Vec<(Source, Entry)> {
    let has_said = |trainer: &&proto::TrainerStatus| trainer.step > 0 && !trainer.metrics.is_empty();
    let point = |trainer: &proto::TrainerStatus| {
        let values = trainer.metrics.iter().map(|(name, value)| (name.clone(), *value as f32)).collect();
        (Source::Trainer(trainer.index), Entry::Point(Point { step: trainer.step, unix_seconds, values }))
    };
    status.trainers.iter().filter(has_said).map(point).collect()
}

fn ticks() -> tokio::time::Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

struct Task {
    measuring: Measuring,
    folder: Folder,
    /// Locked while the disk works, and by nothing else.
    writer: Arc<Mutex<SeriesWriter>>,
    /// The points that are written and not durable yet, by trainer, as [`Piece::until`].
    unkept: BTreeMap<u32, (u64, u64)>,
    /// When the log said last that the series cannot be written.
    warned: Option<Instant>,
}

/// Measures what this server knows of the whole job.
struct Measuring {
    state: Arc<ServerState>,
    measured: Option<Measured>,
    /// The epoch of the newest point. In a new one the points above its first step are discarded.
    epoch: Option<u64>,
}

/// The last measurement.
#[derive(Clone, Copy, Debug)]
struct Measured {
    step: u64,
    /// Updates until then, and the sum of their staleness.
    staleness: (u64, u64),
    /// When the model was evaluated.
    evaluated: std::time::Instant,
}

impl Task {
    fn new(state: Arc<ServerState>, folder: Folder, writer: Arc<Mutex<SeriesWriter>>) -> Self {
        Self { measuring: Measuring::new(state), folder, writer, unkept: BTreeMap::new(), warned: None }
    }

    async fn run(&mut self, mut pieces: mpsc::Receiver<Piece>, stop: CancellationToken) {
        let mut ticks = ticks();
        let (mut batch, mut unwritten) = (Vec::new(), Vec::new());
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {
                    let measured = self.measuring.measure();
                    unwritten = self.insist(measured.into_iter().collect(), &stop).await;
                    self.flush().await;
                }
                _ = pieces.recv_many(&mut batch, AT_ONCE) => {
                    unwritten = self.insist(std::mem::take(&mut batch), &stop).await;
                }
            }
        }
        pieces.close();
        // First those of which a part may be in a file already, so that they take the same place there.
        batch = unwritten;
        pieces.recv_many(&mut batch, usize::MAX).await;
        batch.extend(self.measuring.measure());
        match self.write(&Arc::new(batch)).await {
            Ok(()) => self.flush().await,
            Err(error) => tracing::warn!(%error, "the last metrics are not in {}", self.folder.display()),
        }
    }

    /// Writes `pieces`, again and again until it succeeds; those that come meanwhile wait. Returns those that are not written when
    /// `stop` ends that.
    async fn insist(&mut self, pieces: Vec<Piece>, stop: &CancellationToken) -> Vec<Piece> {
        let pieces = Arc::new(pieces);
        while let Err(error) = self.write(&pieces).await {
            if self.warned.is_none_or(|warned| warned.elapsed() >= QUIET) {
                self.warned = Some(Instant::now());
                let folder = self.folder.display();
                tracing::warn!(%error, "cannot write the series of metrics to {folder}; trying again, training goes on");
            }
            if stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none() {
                // A disk that hangs holds them.
                return Arc::try_unwrap(pieces).unwrap_or_default();
            }
        }
        Vec::new()
    }

    async fn write(&mut self, pieces: &Arc<Vec<Piece>>) -> io::Result<()> {
        let (writer, written) = (self.writer.clone(), pieces.clone());
        let append = move || {
            let mut writer = writer.lock();
            written.iter().try_for_each(|piece| writer.append(piece.source, &piece.entries))
        };
        self.folder.disk().work(append).await?;
        for Piece { source, until, .. } in pieces.iter() {
            if let Source::Trainer(trainer) = source {
                self.unkept.insert(*trainer, *until);
            }
        }
        Ok(())
    }

    /// Makes durable what was written, and then lets trainers discard it.
    async fn flush(&mut self) {
        let writer = self.writer.clone();
        if let Err(error) = self.folder.disk().work(move || writer.lock().flush()).await {
            tracing::debug!(%error, "the series of metrics is not durable yet");
            return;
        }
        let kept = std::mem::take(&mut self.unkept);
        if let Some(series) = &self.measuring.state.series {
            kept.into_iter().for_each(|(trainer, until)| series.kept(trainer, until));
        }
    }
}

impl Measuring {
    const fn new(state: Arc<ServerState>) -> Self {
        Self { state, measured: None, epoch: None }
    }

    /// Returns what this server knows of the whole job and of each trainer. Until it knows the steps of all trainers it has none of the
    /// job's.
    fn with_trainers(&mut self) -> Vec<(Source, Entry)> {
        let mut pieces = reported(&coordination::status(&self.state), unix_seconds());
        let measured = self.measure().filter(|_| self.epoch.is_some());
        pieces.extend(measured.into_iter().flat_map(|piece| piece.entries).map(|entry| (Source::Job, entry)));
        pieces
    }

    /// Returns what this server knows of the whole job, if training has moved since the last time. Discards the points of
    /// steps that are made again.
    fn measure(&mut self) -> Option<Piece> {
        let state = &self.state;
        let keeps_state = state.config.checkpoint.is_some();
        // Until then, and on the way to a checkpoint, it knows of no step, or of some trainers' alone.
        let epoch = if keeps_state { state.recovery.whole_epoch()? } else { 0 };
        if !state.has_state() {
            return None;
        }
        let status = coordination::status(state);
        let elastic = state.config.min_trainers.is_some();
        // A process that was started anew does not know the steps of trainers that had finished before.
        let is_unknown = |trainer: &&proto::TrainerStatus| {
            trainer.step == 0 && trainer.state == i32::from(proto::TrainerState::Finished)
        };
        let unknown = status.trainers.iter().filter(is_unknown).count() as u64;
        // The status has the sum over all trainers; that of an elastic job counts batches.
        let known = u64::from(state.config.trainers).saturating_sub(unknown).max(1);
        let step = if elastic { status.step } else { status.step / known };
        let staleness = {
            let histogram = state.metrics.blocks.staleness();
            (histogram.total(), histogram.sum())
        };
        let (evaluation, evaluated) = state.members().evaluation();
        let before = self.measured.replace(Measured { step, staleness, evaluated });
        // Without checkpoints a process that was started anew hears of each trainer's steps with its next one. Points at
        // earlier steps are there already.
        let has_said = |trainer: &proto::TrainerStatus| trainer.step > 0 || is_unknown(&trainer);
        let knows_steps = keeps_state || (step > 0 && status.trainers.iter().all(has_said));
        // A process that took over its blocks goes on with the series of the one before.
        if self.epoch.is_none() && state.recovery.has_taken_over() {
            self.epoch = Some(epoch);
        }
        let begins = knows_steps && self.epoch != Some(epoch);
        if begins {
            self.epoch = Some(epoch);
        } else if before.map_or(step == 0, |before| before.step == step) {
            return None;
        }
        let mut entries = Vec::new();
        if begins {
            entries.push(Entry::Rewind(step.saturating_sub(1)));
        }
        let piece = |entries| Some(Piece { source: Source::Job, entries, until: (0, 0) });
        if step == 0 {
            return piece(entries);
        }
        let active = |trainer: &&proto::TrainerStatus| trainer.state == i32::from(proto::TrainerState::Active);
        let trainers = status.trainers.iter().filter(active).count();
        let mut values = BTreeMap::from([("trainers", trainers as f64)]);
        // At the end all have left, and have no speed.
        if trainers > 0 {
            values.insert("examples_per_second", status.examples_per_second);
            values.insert("stragglers", status.stragglers.len() as f64);
        }
        if !elastic {
            let Training { optimizer, schedule, .. } = &state.config.training;
            values.insert("learning_rate", optimizer.learning_rate * Schedule::from(schedule).factor(step));
        }
        let (updates, sum) = before.map_or((0, 0), |before| before.staleness);
        if staleness.0 > updates {
            values.insert("staleness", (staleness.1 - sum) as f64 / (staleness.0 - updates) as f64);
        }
        let mut values: BTreeMap<_, _> =
            values.into_iter().map(|(name, value)| (name.to_owned(), value as f32)).collect();
        if before.is_none_or(|before| before.evaluated != evaluated) {
            values.extend(evaluation.into_iter().map(|(name, value)| (name, value as f32)));
        }
        entries.push(Entry::Point(Point { step, unix_seconds: unix_seconds(), values }));
        piece(entries)
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::Environment;

    use super::*;
    use crate::checkpoint::Concluded;
    use crate::clock::now;
    use crate::server::config::{CheckpointConfig, ServerConfig};

    const NOTHING: [(&str, u64); 0] = [];

    /// Measures a job of two trainers that have joined.
    fn measuring(folder: &Folder, keeps_state: bool) -> Measuring {
        let servers = vec!["ps-0:29500".to_owned()];
        let environment = Environment::new("mnist", "job-1", servers.clone(), 2, Training::default());
        let checkpoint = CheckpointConfig {
            job: "mnist".into(),
            incarnation: 0,
            folder: folder.clone(),
            interval: Duration::from_secs(60),
            keep: 1,
            resume: true,
            servers,
        };
        let state = ServerState::new(ServerConfig {
            shared_memory: false,
            checkpoint: keeps_state.then_some(checkpoint),
            series: Some(folder.clone()),
            ..ServerConfig::new(&environment)
        });
        for index in 0..2 {
            let id = proto::TrainerId { job_uid: "job-1".into(), index, incarnation: 0 };
            state.members().join(&id, Vec::new(), 1000, now()).expect("joins");
        }
        Measuring::new(state)
    }

    /// Returns the steps that it goes back to, and those of points.
    fn measured(measuring: &mut Measuring) -> Vec<(&'static str, u64)> {
        let entries = measuring.measure().map(|piece| piece.entries).unwrap_or_default();
        let described = entries.into_iter().map(|entry| match entry {
            Entry::Rewind(step) => ("back to", step),
            Entry::Point(point) => ("at", point.step),
        });
        described.collect()
    }

    #[tokio::test]
    async fn without_checkpoints_the_series_begins_anew_when_the_steps_of_all_trainers_are_known() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut measuring = measuring(&Folder::from(scratch.path()), false);
        assert_eq!(measured(&mut measuring), NOTHING);
        measuring.state.members().gave(0, 499, now());
        assert_eq!(measured(&mut measuring), [("at", 250)], "the writer has later points, and leaves it out");
        assert_eq!(measured(&mut measuring), NOTHING);
        measuring.state.members().gave(1, 499, now());
        assert_eq!(measured(&mut measuring), [("back to", 499), ("at", 500)]);
        measuring.state.members().gave(1, 501, now());
        assert_eq!(measured(&mut measuring), [("at", 501)]);
    }

    #[tokio::test]
    async fn with_checkpoints_the_series_goes_back_with_the_servers() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut measuring = measuring(&Folder::from(scratch.path()), true);
        let state = measuring.state.clone();
        let restore = |epoch, steps: &[u64]| {
            state.recovery.set_epoch(0);
            state.members().rewind(steps, &Concluded::new(), now());
            state.recovery.set_epoch(epoch);
            state.recovery.set_whole();
        };
        state.members().gave(0, 7, now());
        assert_eq!(measured(&mut measuring), NOTHING, "it has not gone to a checkpoint");
        restore(3, &[]);
        assert_eq!(measured(&mut measuring), [("back to", 0)], "it begins from nothing");
        assert_eq!(measured(&mut measuring), NOTHING);
        (0..2).for_each(|trainer| state.members().gave(trainer, 5, now()));
        assert_eq!(measured(&mut measuring), [("at", 6)]);
        state.recovery.set_epoch(0);
        assert_eq!(measured(&mut measuring), NOTHING, "on the way");
        restore(4, &[6, 6]);
        assert_eq!(measured(&mut measuring), [("back to", 5), ("at", 6)], "the point at this step is written again");
        restore(5, &[2, 2]);
        assert_eq!(measured(&mut measuring), [("back to", 1), ("at", 2)]);
    }

    #[tokio::test]
    async fn without_a_folder_what_the_trainers_report_is_measured_too() {
        let environment = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 2, Training::default());
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) });
        assert_eq!(folder(&state), None);
        let id = |index| proto::TrainerId { job_uid: "job-1".into(), index, incarnation: 0 };
        (0..2).for_each(|index| state.members().join(&id(index), Vec::new(), 1000, now()).expect("joins"));
        let mut measuring = Measuring::new(state.clone());
        let mut said = |trainer, step: u64, loss| {
            state.members().gave(trainer, step - 1, now());
            state.members().report(&id(trainer), 0, [("loss".to_owned(), loss)].into(), now()).expect("reports");
            let described = measuring.with_trainers().into_iter().map(|(source, entry)| match entry {
                Entry::Rewind(step) => (source, step, None),
                Entry::Point(point) => (source, point.step, point.values.get("loss").copied()),
            });
            described.collect::<Vec<_>>()
        };
        let (first, second) = (Source::Trainer(0), Source::Trainer(1));
        assert_eq!(said(0, 10, 0.5), [(first, 10, Some(0.5))], "the other one has said nothing");
        let all = [(first, 10, Some(0.5)), (second, 12, Some(0.25)), (Source::Job, 10, None), (Source::Job, 11, None)];
        assert_eq!(said(1, 12, 0.25), all, "the series begins");
        assert_eq!(said(1, 14, 0.25), [all[0], (second, 14, Some(0.25)), (Source::Job, 12, None)]);
    }
}
