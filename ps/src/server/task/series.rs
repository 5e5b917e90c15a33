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

/// Writes until `stop`, then what has come until then.
pub async fn run(state: Arc<ServerState>, stop: CancellationToken) {
    let Some(pieces) = state.series.as_ref().and_then(|series| series.pieces()) else { return };
    let Some(folder) = stop.run_until_cancelled(folder(&state)).await else { return };
    let writer = Arc::new(Mutex::new(SeriesWriter::new(folder.clone(), state.recovery.instance)));
    let mut task = Task { state, folder, writer, unkept: BTreeMap::new(), measured: None, warned: None };
    task.run(pieces, stop).await;
}

/// Returns the folder of the series; with checkpoints when the run is known.
async fn folder(state: &ServerState) -> Folder {
    if let Some(folder) = &state.config.series {
        return folder.clone();
    }
    loop {
        if let (Some(checkpoint), Some(run)) = (&state.config.checkpoint, state.recovery.run()) {
            return Runs::new(&checkpoint.folder).catalog(run).folder().folder(IN_RUN);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

struct Task {
    state: Arc<ServerState>,
    folder: Folder,
    /// Locked while the disk works, and by nothing else.
    writer: Arc<Mutex<SeriesWriter>>,
    /// The points that are written and not durable yet, by trainer, as [`Piece::until`].
    unkept: BTreeMap<u32, (u64, u64)>,
    measured: Option<Measured>,
    /// When the log said last that the series cannot be written.
    warned: Option<Instant>,
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
    async fn run(&mut self, mut pieces: mpsc::Receiver<Piece>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {
                    let measured = self.measure();
                    self.insist(measured.into_iter().collect(), &stop).await;
                    self.flush().await;
                }
                _ = pieces.recv_many(&mut batch, AT_ONCE) => self.insist(std::mem::take(&mut batch), &stop).await,
            }
        }
        pieces.close();
        pieces.recv_many(&mut batch, usize::MAX).await;
        batch.extend(self.measure());
        match self.write(&Arc::new(batch)).await {
            Ok(()) => self.flush().await,
            Err(error) => tracing::warn!(%error, "the last metrics are not in {}", self.folder.display()),
        }
    }

    /// Writes `pieces`, again and again until it succeeds; those that come meanwhile wait.
    async fn insist(&mut self, pieces: Vec<Piece>, stop: &CancellationToken) {
        let pieces = Arc::new(pieces);
        while let Err(error) = self.write(&pieces).await {
            if self.warned.is_none_or(|warned| warned.elapsed() >= QUIET) {
                self.warned = Some(Instant::now());
                let folder = self.folder.display();
                tracing::warn!(%error, "cannot write the series of metrics to {folder}; trying again, training goes on");
            }
            if stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none() {
                return;
            }
        }
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
        if let Some(series) = &self.state.series {
            kept.into_iter().for_each(|(trainer, until)| series.kept(trainer, until));
        }
    }

    /// Returns what this server knows of the whole job, if training has moved since the last time.
    fn measure(&mut self) -> Option<Piece> {
        let state = &self.state;
        // Until then it knows of no step, or of some trainers' alone.
        if !state.has_state() {
            return None;
        }
        let status = coordination::status(state);
        let elastic = state.config.min_trainers.is_some();
        // The status has the sum over all trainers; that of an elastic job counts batches.
        let step = if elastic { status.step } else { status.step / u64::from(state.config.trainers.max(1)) };
        let staleness = {
            let histogram = state.metrics.blocks.staleness();
            (histogram.total(), histogram.sum())
        };
        let (evaluation, evaluated) = state.members().evaluation();
        let before = self.measured.replace(Measured { step, staleness, evaluated });
        if before.map_or(step == 0, |before| before.step == step) {
            return None;
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
        let point = Entry::Point(Point { step, unix_seconds: unix_seconds(), values });
        // The servers went back to a checkpoint, or a process before this one was further.
        let goes_back = before.is_none_or(|before| before.step > step);
        let entries = goes_back.then_some(Entry::Rewind(step.saturating_sub(1))).into_iter().chain([point]).collect();
        Some(Piece { source: Source::Job, entries, until: (0, 0) })
    }
}
