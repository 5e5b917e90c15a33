//! One trainer: its share of the steps, and the evaluation.

use std::time::{Duration, Instant};

use psjobs_api::{Environment, ReplicaResult};
use psjobs_ps::client::{self, ClientError, SessionConfig, TensorSpec};
use psjobs_ps::sparse::Local;
use tch::{Device, Kind, nn, no_grad};

use super::error::RecsysError;
use super::ring_rendezvous::RingRendezvous;
use super::rows::{Beginning, Coming, Rows};
use super::settings::Settings;
use crate::allreduce::buckets::{BUCKET, Buckets};
use crate::allreduce::{Ring, RingError};
use crate::data::clicks::{ClickBatch, Clicks, auc};
use crate::model::dlrm::{Dlrm, Sizes};
use psjobs_worker::Metrics;
use psjobs_worker::data::Dataset as _;
use psjobs_worker::data::loader::Loader;
use psjobs_worker::data::sampler::Split;
use psjobs_worker::train::modules::Participant;
use psjobs_worker::train::progress::{Done, Progress};
use psjobs_worker::train::replicated_layers::ReplicatedLayers;
use psjobs_worker::train::staged_backward::Tape;
use psjobs_worker::train::step_clock::{Part, StepClock};

/// The stage whose inputs are the rows.
const ROWS_STAGE: usize = 1;
/// Examples that evaluation reads at once.
const EVALUATION_BATCH: usize = 1024;

pub struct Trainer<'a> {
    /// `None` if this trainer is alone.
    job: Option<(&'a Environment, &'a Participant)>,
    meeting: RingRendezvous<'a>,
    settings: &'a Settings,
    model: Dlrm,
    dense: ReplicatedLayers,
    beginning: Beginning,
    rows: Rows,
    ring: Ring,
    next: u64,
    waited: Duration,
}

/// The result of a step.
enum Outcome {
    /// Its loss, and the rows of the next batch on their way.
    Done(f64, Coming),
    /// Somebody asked this trainer to stop while it waited.
    Interrupted,
    /// Another trainer is gone.
    Lost(RingError),
    /// The servers have gone to a checkpoint.
    Back,
}

/// The model, its dense layers, and their tensors in the order of those.
pub fn build(clicks: &Clicks, settings: &Settings) -> (Dlrm, ReplicatedLayers, Vec<TensorSpec>) {
    let Settings { plan, table, layers, training, .. } = settings;
    let sizes = Sizes {
        numbers: clicks.source().numbers() as i64,
        categories: clicks.source().categories() as i64,
        width: table.width as i64,
        lower: layers.0.clone(),
        upper: layers.1.clone(),
    };
    tch::manual_seed(plan.seed as i64);
    let variables = nn::VarStore::new(Device::Cpu);
    let model = Dlrm::new(&variables.root(), &sizes);
    let dense = ReplicatedLayers::new(&model.stages(), &variables.variables().into_iter().collect(), training);
    tracing::info!(parameters = dense.elements(), width = table.width, "dense layers are here");
    let tensors = dense.tensors().to_vec();
    (model, dense, tensors)
}

impl<'a> Trainer<'a> {
    pub fn begin(
        job: Option<(&'a Environment, &'a Participant)>,
        mut meeting: RingRendezvous<'a>,
        settings: &'a Settings,
        (model, mut dense): (Dlrm, ReplicatedLayers),
    ) -> Result<Self, RecsysError> {
        let Settings { table, training, interrupt, .. } = settings;
        let (mut rows, next) = match job {
            None => (Rows::Here(Box::new(Local::new(vec![table.clone()], training)?)), 0),
            Some((_, participant)) => {
                let config = SessionConfig { interrupt: interrupt.clone(), ..participant.config().clone() };
                let tables = client::Tables::open(config, vec![table.clone()]).map_err(RecsysError::Open)?;
                let next = tables.next_step();
                (Rows::Servers(tables), next)
            }
        };
        let beginning = Beginning::of(&dense, &rows);
        let next = match rows.resume(&mut dense, &beginning) {
            Err(ClientError::TablesLost { .. }) => next, // The meeting finds that out again.
            resumed => resumed.map_err(RecsysError::Follow)?,
        };
        let (ring, next) = meeting.meet(&mut rows, &mut dense, &beginning, next)?;
        let mut trainer =
            Self { job, meeting, settings, model, dense, beginning, rows, ring, next, waited: Duration::ZERO };
        trainer.settle()?;
        trainer.begin_series();
        Ok(trainer)
    }

    /// Does the steps that are left; `stop` is asked before each. `None` if it said so.
    pub fn train(
        &mut self,
        clicks: &Clicks,
        split: Split,
        total: u64,
        stop: impl Fn() -> bool,
    ) -> Result<Option<ReplicaResult>, RecsysError> {
        let plan = &self.settings.plan;
        let sampler = split.sampler(plan.trainer)?;
        let load = |step| Loader::start(clicks.clone(), sampler.clone(), step..total);
        let mut progress = Progress::new(total, plan.log_every, Instant::now());
        let mut clock = StepClock::of_whole_steps(Instant::now());
        let mut batches = load(self.next);
        let mut coming: Option<(ClickBatch, Coming)> = None;
        loop {
            let step = self.next;
            if step >= total {
                if self.conclude()? {
                    return Ok(Some(progress.result(self.waiting())));
                }
                self.meet_again()?;
                batches = load(self.next);
                continue;
            }
            let mut read = || batches.next_batch().map_err(|source| RecsysError::Data { step, source });
            if stop() {
                self.report(&progress, clock);
                if plan.trainer == 0 {
                    self.rows.keep_at_stop(&self.dense, self.next);
                }
                return Ok(None);
            }
            clock.begin(self.waiting(), Instant::now());
            let (batch, rows) = match coming.take() {
                Some(coming) => coming,
                None => (read()?, None),
            };
            let following = if step + 1 < total { Some(read()?) } else { None };
            let (began, waited) = (Instant::now(), self.waiting());
            clock.end(Part::Data, waited, began);
            let outcome = self.step(step, &batch, rows, following.as_ref())?;
            clock.end(Part::Backward, self.waiting(), Instant::now());
            match outcome {
                Outcome::Done(loss, rows) => {
                    self.next = step + 1;
                    self.keep(false).map_err(|source| RecsysError::Rows { step, source })?;
                    plan.rest(step, plan.batch, began.elapsed().saturating_sub(self.waiting() - waited));
                    coming = following.map(|batch| (batch, rows));
                    let done = Done { next: step + 1, examples: plan.batch, loss, waiting: self.waiting() };
                    let due = progress.step(done, Instant::now());
                    if let (Some(point), Some((_, participant))) = (progress.take_point(), self.job) {
                        participant.recorder().record(step + 1, &point);
                    }
                    if due {
                        self.report(&progress, clock);
                    }
                }
                Outcome::Interrupted => {} // The loop asks `stop`.
                Outcome::Lost(why) => {
                    tracing::warn!("{why}; waiting for its replacement");
                    self.meet_again()?;
                    batches = load(self.next);
                }
                Outcome::Back => {
                    self.meet_again()?;
                    batches = load(self.next);
                }
            }
        }
    }

    /// Waits until the steps given are in a checkpoint, where there are any; false if the servers have gone to one
    /// without them.
    fn conclude(&mut self) -> Result<bool, RecsysError> {
        self.settle()?;
        let step = self.next;
        self.rows.conclude().map_err(|source| RecsysError::Rows { step, source })
    }

    /// Leaves the others, its work done or not.
    pub fn leave(self, done: bool) {
        if done {
            self.ring.finish();
        }
    }

    /// Discards the recorded metrics of steps that are made again.
    fn begin_series(&self) {
        if let Some((_, participant)) = self.job {
            participant.recorder().begin_at(self.next);
        }
    }

    fn report(&self, progress: &Progress, clock: StepClock) {
        if let Some((_, participant)) = self.job {
            let spent = Some((clock.spent(Instant::now()), self.waiting()));
            participant.report(self.next, progress.examples(), &progress.metrics(), spent);
        }
    }

    fn waiting(&self) -> Duration {
        self.waited + self.rows.waiting() + self.ring.waiting()
    }

    /// Closes the ring anew: the others wait, as this one does, until a lost trainer's replacement has come, or all are
    /// where the servers are.
    fn meet_again(&mut self) -> Result<(), RecsysError> {
        let start = Instant::now();
        let before = self.ring.waiting();
        // Those who still wait for this trainer in the old one hear that it has left that.
        self.ring = Ring::start(None, self.settings.interrupt.clone()).map_err(RecsysError::Start)?;
        let met = self.meeting.meet(&mut self.rows, &mut self.dense, &self.beginning, self.next);
        self.waited += before + start.elapsed();
        match met {
            Ok((ring, next)) => (self.ring, self.next) = (ring, next),
            Err(error) if error.is_interruption() => return Ok(()), // The loop asks `stop`.
            Err(error) => return Err(error),
        }
        tracing::info!(step = self.next, "all trainers are there again");
        self.begin_series();
        self.settle()
    }

    /// The servers have the layers that all begin with, so that whatever they lose there is something to go back to.
    fn settle(&mut self) -> Result<(), RecsysError> {
        self.keep(true).map_err(RecsysError::Follow)
    }

    /// Trainer 0 gives the dense layers to the servers, if a checkpoint wants them, or `now`.
    fn keep(&mut self, now: bool) -> Result<(), ClientError> {
        if self.settings.plan.trainer != 0 {
            return Ok(());
        }
        match self.rows.keep(&self.dense, self.next, now) {
            // The next step finds that out again.
            Err(ClientError::TablesLost { .. } | ClientError::Interrupted) => Ok(()),
            kept => kept,
        }
    }

    /// One step, with rows that are on their way. Nothing of a loss that is not a number reaches the servers.
    fn step(
        &mut self,
        step: u64,
        batch: &ClickBatch,
        rows: Coming,
        following: Option<&ClickBatch>,
    ) -> Result<Outcome, RecsysError> {
        let vectors = match self.rows.pulled(rows, &batch.keys) {
            Ok(vectors) => vectors.set_requires_grad(true),
            Err(error) => return self.without_rows(step, error),
        };
        let mut tape = Tape::new(self.ring.place().size > 1);
        let scores = self.model.forward(&batch.numbers, &vectors, &batch.places, &mut tape);
        let loss = Dlrm::loss(&scores, &batch.clicked);
        let mean = loss.double_value(&[]);
        if !mean.is_finite() {
            return Err(RecsysError::Diverged { step, loss: mean });
        }
        let mut stages = self.model.stages();
        stages[ROWS_STAGE].push(vectors);
        let Self { rows, ring, .. } = self;
        let mut buckets = Buckets::new(ring, BUCKET);
        let mut pushing = None;
        tape.backward(&loss, &stages, |stage, mut gradients| {
            if stage == ROWS_STAGE
                && let Some(of_rows) = gradients.pop()
            {
                pushing = rows.begin_push(step, &batch.keys, &of_rows);
            }
            let sized = gradients.into_iter().zip(&stages[stage]);
            buckets.add(&sized.map(|(gradient, parameter)| (gradient, parameter.numel())).collect::<Vec<_>>());
        });
        let gradient = match buckets.mean() {
            Ok(gradient) => gradient,
            Err(RingError::Interrupted) => return Ok(Outcome::Interrupted),
            Err(lost @ RingError::Lost { .. }) => return Ok(Outcome::Lost(lost)),
            Err(source) => return Err(RecsysError::Gradients { step, source }),
        };
        if let Err(error) = self.rows.pushed(pushing, self.ring.broken()) {
            return self.without_rows(step, error);
        }
        // They travel while the dense layers are updated.
        let coming = following.and_then(|following| self.rows.begin_pull(&following.keys));
        self.dense.update(step, &gradient);
        Ok(Outcome::Done(mean, coming))
    }

    /// Why the servers did not answer: a wait that was ended, or an error.
    fn without_rows(&mut self, step: u64, error: ClientError) -> Result<Outcome, RecsysError> {
        match (error, self.ring.lost()) {
            (ClientError::TablesLost { .. }, _) if self.rows.can_go_back() => Ok(Outcome::Back),
            (ClientError::Interrupted, Some(lost)) => Ok(Outcome::Lost(lost)),
            (ClientError::Interrupted, None) => Ok(Outcome::Interrupted),
            (source, _) => Err(RecsysError::Rows { step, source }),
        }
    }

    /// `auc` and `log_loss` on the examples; `best_auc`, which a model exceeds only by chance, where it is known.
    pub fn evaluate(&mut self, clicks: &Clicks) -> Result<Metrics, ClientError> {
        loop {
            match self.score(clicks) {
                // What they have gone to has every step.
                Err(ClientError::TablesLost { .. }) if self.rows.can_go_back() => {
                    self.next = self.rows.follow(&mut self.dense, &self.beginning, self.next)?;
                }
                scored => return scored,
            }
        }
    }

    fn score(&mut self, clicks: &Clicks) -> Result<Metrics, ClientError> {
        let (mut scored, mut loss) = (Vec::new(), 0.0);
        let examples: Vec<i64> = (0..clicks.examples() as i64).collect();
        for examples in examples.chunks(EVALUATION_BATCH) {
            let batch = clicks.batch(examples);
            let vectors = self.rows.pulled(None, &batch.keys)?;
            let mut tape = Tape::new(false);
            let scores = no_grad(|| self.model.forward(&batch.numbers, &vectors, &batch.places, &mut tape));
            loss += Dlrm::loss(&scores, &batch.clicked).double_value(&[]) * examples.len() as f64;
            let clicked = Vec::<f32>::try_from(batch.clicked.to_kind(Kind::Float)).expect("one for each example");
            scored.extend(Dlrm::values(&scores).into_iter().zip(clicked.into_iter().map(|clicked| clicked > 0.5)));
        }
        let mean = loss / scored.len() as f64;
        let best = clicks.best_auc().map(|best| ("best_auc".to_owned(), best));
        Ok([("auc".to_owned(), auc(scored)), ("log_loss".to_owned(), mean)].into_iter().chain(best).collect())
    }
}
