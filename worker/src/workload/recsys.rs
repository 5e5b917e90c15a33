//! Predicting clicks with tables too large for one trainer: the categories' vectors are rows of a sparse
//! table on the servers, the dense layers are every trainer's own and follow the mean of the gradients
//! that all-reduce gives. Both travel while the backward pass goes on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use psjobs_api::{Environment, ReplicaResult, Training};
use psjobs_ps::client::{self, ClientError, Pulling, Pushing, RowGradients, SessionConfig};
use psjobs_ps::sparse::{Local, SpecError, TableSpec};
use tch::{Device, Kind, Tensor, nn, no_grad};

use super::Metrics;
use crate::allreduce::buckets::{BUCKET, Buckets};
use crate::allreduce::{Neighbours, Place, Ring, RingError};
use crate::data::Dataset as _;
use crate::data::clicks::{ClickBatch, Clicks, auc};
use crate::data::loader::{Loader, LoaderEnded};
use crate::data::sampler::{Split, TooFewExamples};
use crate::model::dlrm::{Dlrm, Sizes};
use crate::remote::{Registry, RemoteError, hosting, rendezvous};
use crate::train::Plan;
use crate::train::dense::Dense;
use crate::train::modules::{ModulesError, Participant};
use crate::train::progress::Progress;
use crate::train::stages::Tape;

/// The stage whose inputs are the rows.
const ROWS_STAGE: usize = 1;
/// Examples that evaluation reads at once.
const EVALUATION_BATCH: usize = 1024;

/// How it trains.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub table: TableSpec,
    /// Units of the lower and of the upper layers, without the vector and the score.
    pub layers: (Vec<i64>, Vec<i64>),
    pub training: Training,
    /// How long a server or another trainer may stay away.
    pub patience: Duration,
    /// Set to end whatever is waited for.
    pub interrupt: Arc<AtomicBool>,
}

/// Training failed.
#[derive(Debug, thiserror::Error)]
pub enum RecsysError {
    #[error(transparent)]
    TooFewExamples(#[from] TooFewExamples),
    #[error(transparent)]
    Table(#[from] SpecError),
    #[error("this trainer cannot begin")]
    Join(#[source] ModulesError),
    #[error("this trainer cannot begin")]
    Open(#[source] ClientError),
    #[error("this trainer cannot begin")]
    Publish(#[source] RemoteError),
    #[error("this trainer cannot begin")]
    Meet(#[source] RingError),
    #[error("this trainer cannot begin")]
    Start(#[source] std::io::Error),
    #[error("this trainer has no data for step {step}")]
    Data { step: u64, source: LoaderEnded },
    #[error("this trainer cannot go on at step {step}")]
    Rows { step: u64, source: ClientError },
    #[error("this trainer cannot go on at step {step}")]
    Gradients { step: u64, source: RingError },
    #[error("the loss is {loss} at step {step}: training has diverged; lower the learning rate")]
    Diverged { step: u64, loss: f64 },
    #[error("the model is trained, but cannot be evaluated")]
    Evaluate(#[source] ClientError),
    #[error("this trainer is done, but cannot say so")]
    Leave(#[source] ModulesError),
}

impl RecsysError {
    /// Whether somebody asked this trainer to stop while it waited.
    fn is_interrupt(&self) -> bool {
        matches!(
            self,
            Self::Rows { source: ClientError::Interrupted, .. }
                | Self::Gradients { source: RingError::Interrupted, .. }
        )
    }
}

/// Trains on `clicks` and tests on `held_out`; alone without `environment`. `ready` is called when the
/// first step is about to begin; `stop` is asked before each. `None` if it said so.
///
/// # Errors
/// See [`RecsysError`].
pub fn train(
    environment: Option<&Environment>,
    clicks: &Clicks,
    held_out: &Clicks,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, RecsysError> {
    let plan = &settings.plan;
    let split = Split { examples: clicks.examples(), batch: plan.batch, trainers: plan.trainers, seed: plan.seed };
    let total = plan.total_steps(split.steps_per_epoch()?);
    let join = |environment| {
        let joined = Participant::join(environment, Registry::default(), total, settings.patience);
        joined.map_err(RecsysError::Join)
    };
    let participant = environment.map(join).transpose()?;
    let mut trainer = Trainer::begin(environment.zip(participant.as_ref()), clicks, settings, total)?;
    ready();
    let result = trainer.train(participant.as_ref(), clicks, split, total, stop)?;
    let result = match result {
        Some(mut result) if plan.trainer == 0 => {
            result.metrics.extend(trainer.evaluate(held_out).map_err(RecsysError::Evaluate)?);
            Some(result)
        }
        other => other,
    };
    drop(trainer);
    if let Some(participant) = participant {
        participant.leave(result.as_ref()).map_err(RecsysError::Leave)?;
    }
    Ok(result)
}

/// Where the rows are.
enum Rows {
    Servers(client::Tables),
    Here(Local),
}

/// Rows on their way, or none where they need not travel.
type Coming = Option<Pulling>;

impl Rows {
    fn begin_pull(&self, keys: &[u64]) -> Coming {
        if let Self::Servers(tables) = self { Some(tables.begin_pull(&[(0, keys)])) } else { None }
    }

    /// The vectors of keys, `[k, width]`.
    fn pulled(&mut self, coming: Coming, keys: &[u64]) -> Result<Tensor, ClientError> {
        let rows = match (self, coming) {
            (Self::Servers(tables), Some(pulling)) => tables.pulled(pulling)?.pop().unwrap_or_default(),
            (Self::Servers(tables), None) => tables.pull(&[(0, keys)])?.pop().unwrap_or_default(),
            (Self::Here(table), _) => table.pull(0, keys),
        };
        Ok(Tensor::from_slice(&rows).view([keys.len() as i64, -1]))
    }

    /// What is still to be waited for.
    fn begin_push(&mut self, step: u64, keys: &[u64], gradient: &Tensor) -> Option<Pushing> {
        let mut values = vec![0.0; gradient.numel()];
        gradient.copy_data(&mut values, gradient.numel());
        match self {
            Self::Servers(tables) => Some(tables.begin_push(step, &[RowGradients { table: 0, keys, values: &values }])),
            Self::Here(table) => {
                table.push(step, 0, keys, &values);
                None
            }
        }
    }

    fn pushed(&mut self, pushing: Option<Pushing>) -> Result<(), ClientError> {
        match (self, pushing) {
            (Self::Servers(tables), Some(pushing)) => tables.pushed(pushing),
            _ => Ok(()),
        }
    }

    fn waiting(&self) -> Duration {
        if let Self::Servers(tables) = self { tables.waiting() } else { Duration::ZERO }
    }
}

struct Trainer<'a> {
    settings: &'a Settings,
    model: Dlrm,
    dense: Dense,
    rows: Rows,
    ring: Ring,
    first: u64,
}

impl<'a> Trainer<'a> {
    fn begin(
        job: Option<(&Environment, &Participant)>,
        clicks: &Clicks,
        settings: &'a Settings,
        total: u64,
    ) -> Result<Self, RecsysError> {
        let Settings { plan, table, layers, training, .. } = settings;
        let sizes = Sizes {
            numbers: clicks.source().numbers() as i64,
            categories: clicks.source().categories() as i64,
            width: table.width as i64,
            lower: layers.0.clone(),
            upper: layers.1.clone(),
        };
        tch::manual_seed(plan.seed as i64);
        let model = Dlrm::new(&nn::VarStore::new(Device::Cpu).root(), &sizes);
        let dense = Dense::new(&model.stages(), training);
        tracing::info!(parameters = dense.elements(), width = table.width, "dense layers are here");
        let (rows, mut ring, next) = match job {
            None => {
                let place = Place { rank: 0, size: 1 };
                let ring = Ring::start(place, None, settings.interrupt.clone()).map_err(RecsysError::Start)?;
                (Rows::Here(Local::new(vec![table.clone()], training)?), ring, 0)
            }
            Some((environment, participant)) => {
                let config = SessionConfig::new(environment, Vec::new(), total);
                let interrupt = settings.interrupt.clone();
                let config = SessionConfig { connect_timeout: settings.patience, interrupt, ..config };
                let tables = client::Tables::open(config, vec![table.clone()]).map_err(RecsysError::Open)?;
                let next = tables.next_step();
                (Rows::Servers(tables), meet(environment, participant, settings)?, next)
            }
        };
        // A trainer that was replaced goes on where the tables are; so do the others, which lost it.
        let first = ring.smallest(next).map_err(RecsysError::Meet)?;
        if first > 0 {
            tracing::warn!(step = first, "the tables go on from this step; the dense layers begin anew");
        }
        Ok(Self { settings, model, dense, rows, ring, first })
    }

    fn train(
        &mut self,
        participant: Option<&Participant>,
        clicks: &Clicks,
        split: Split,
        total: u64,
        stop: impl Fn() -> bool,
    ) -> Result<Option<ReplicaResult>, RecsysError> {
        let plan = &self.settings.plan;
        let mut batches = Loader::start(clicks.clone(), split.sampler(plan.trainer)?, self.first..total);
        let mut progress = Progress::new(total, plan.batch, plan.log_every, Instant::now());
        let report = |step, progress: &Progress| {
            if let Some(participant) = participant {
                participant.report(step, progress.examples(), &progress.metrics());
            }
        };
        let mut read = |step| batches.next_batch().map_err(|source| RecsysError::Data { step, source });
        let mut coming: Option<(ClickBatch, Coming)> = None;
        for step in self.first..total {
            if stop() {
                report(step, &progress);
                return Ok(None);
            }
            let (batch, rows) = match coming.take() {
                Some(coming) => coming,
                None => (read(step)?, None),
            };
            let next = if step + 1 < total { Some(read(step + 1)?) } else { None };
            match self.step(step, &batch, rows, next.as_ref()) {
                Ok((loss, rows)) => {
                    coming = next.map(|next| (next, rows));
                    if progress.step(step + 1, loss, self.waiting(), Instant::now()) {
                        report(step + 1, &progress);
                    }
                }
                Err(error) if error.is_interrupt() => {
                    report(step, &progress);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(progress.result(self.waiting())))
    }

    fn waiting(&self) -> Duration {
        self.rows.waiting() + self.ring.waiting()
    }

    /// One step, with rows that are on their way; its loss, and the rows of the `next` batch on theirs.
    /// Nothing of a loss that is not a number reaches the servers.
    fn step(
        &mut self,
        step: u64,
        batch: &ClickBatch,
        rows: Coming,
        next: Option<&ClickBatch>,
    ) -> Result<(f64, Coming), RecsysError> {
        let cannot = |source| RecsysError::Rows { step, source };
        let vectors = self.rows.pulled(rows, &batch.keys).map_err(cannot)?.set_requires_grad(true);
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
        let gradient = buckets.mean().map_err(|source| RecsysError::Gradients { step, source })?;
        self.rows.pushed(pushing).map_err(cannot)?;
        // They travel while the dense layers are updated.
        let coming = next.and_then(|next| self.rows.begin_pull(&next.keys));
        self.dense.update(step, &gradient);
        Ok((mean, coming))
    }

    /// `auc` and `log_loss` on the examples; `best_auc`, which nobody could beat but by luck, where it is known.
    fn evaluate(&mut self, clicks: &Clicks) -> Result<Metrics, ClientError> {
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

/// Forms the ring with the other trainers, which server 0 tells the addresses of.
fn meet(environment: &Environment, participant: &Participant, settings: &Settings) -> Result<Ring, RecsysError> {
    let place = Place { rank: environment.index, size: environment.trainers };
    let interrupt = settings.interrupt.clone();
    if place.size == 1 {
        return Ring::start(place, None, interrupt).map_err(RecsysError::Start);
    }
    let (endpoint, server) = (participant.endpoint(), &participant.servers()[0]);
    let listener = rendezvous::listen_towards(&environment.servers[0]).map_err(RecsysError::Start)?;
    let own = listener.local_addr().map_err(RecsysError::Start)?.to_string();
    endpoint.publish_address(server, &own).map_err(RecsysError::Publish)?;
    let next = hosting::trainer_name(place.next());
    let next_address = |patience| endpoint.locate(server, &next, patience).map_err(|error| error.to_string());
    let patience = settings.patience;
    let neighbours = Neighbours::connect(place, &environment.uid, &listener, next_address, patience, &interrupt)
        .map_err(RecsysError::Meet)?;
    tracing::info!(rank = place.rank, size = place.size, "the trainers' ring is closed");
    Ring::start(place, Some(neighbours), interrupt).map_err(RecsysError::Start)
}
