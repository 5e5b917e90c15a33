//! Training: one loop for every workload, with its parameters on servers ([`remote`]) or in this
//! process alone ([`local`]); and one for models that live in other processes ([`modules`]). [`replicated_layers`] and
//! [`staged_backward`] are for layers that every trainer has all of.

pub mod batch_prefetch;
mod completed_gradients;
pub mod evaluator;
pub mod flat;
mod gradient_hooks;
mod gradient_sum;
pub mod local;
mod local_steps;
pub mod micro_batches;
pub mod modules;
mod overlapped_exchanges;
pub mod parameter_buffer;
mod pinned_memory;
mod plan;
pub mod precision;
pub mod progress;
pub mod remote;
pub mod replicated_layers;
pub mod staged_backward;
pub mod step_clock;
pub mod throttle;
mod updater;

use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::time::Instant;

use psjobs_api::ReplicaResult;
use psjobs_api::training::NonFinite;
use psjobs_ps::client::ClientError;
use tch::{Device, Kind, TchError, Tensor, nn};

use crate::data::Dataset;
use crate::data::loader::LoaderEnded;
use crate::data::sampler::{Sampler, Split, TooFewExamples};
use crate::workload::{Metrics, Workload};
use batch_prefetch::BatchPrefetch;
use flat::Flat;
use micro_batches::{Losses, MicroBatch, MicroBatches};
pub use plan::{Plan, Turn};
use progress::{Done, Progress};
use step_clock::{Part, StepClock};
pub use updater::{UpdateError, Updater};

/// How training ended, short of an error.
#[derive(Clone, Debug)]
pub enum Outcome {
    Finished(ReplicaResult),
    /// Asked to stop before the last step.
    Stopped,
}

/// Training failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    TooFewExamples(#[from] TooFewExamples),
    #[error("this trainer has no data for step {step}")]
    Data { step: u64, source: LoaderEnded },
    #[error("this trainer cannot begin")]
    Begin(#[source] UpdateError),
    #[error("this trainer cannot go on at step {step}")]
    Update { step: u64, source: UpdateError },
    #[error("this trainer is done, but cannot say so")]
    Leave(#[source] UpdateError),
    #[error(
        "the loss is {loss} at step {step}: training has diverged; lower the learning rate; with several trainers in \
         Async, leave training.staleness out, or set training.consistency.mode to Sync"
    )]
    Diverged { step: u64, loss: f64 },
    #[error("the model is trained, but cannot be written to {}", file.display())]
    Save { file: PathBuf, source: TchError },
}

impl TrainError {
    /// Returns true if the trainer was given something that cannot work, so that starting it again cannot help.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::TooFewExamples(_) => true,
            Self::Data { source, .. } => source.is_input(),
            Self::Begin(UpdateError::Servers(error)) => error.is_input(),
            // libtorch fails here for want of memory or of its device.
            Self::Begin(UpdateError::Libtorch(_))
            | Self::Update { .. }
            | Self::Leave(_)
            | Self::Diverged { .. }
            | Self::Save { .. } => false,
        }
    }

    /// Returns true if other processes alone end this trainer; see [`ClientError::is_caused_by_others`].
    #[must_use]
    pub fn is_caused_by_others(&self, supervised: bool) -> bool {
        self.of_servers().is_some_and(|error| error.is_caused_by_others(supervised))
    }

    /// Returns true if the other trainers have finished the job, so that nothing is left for this one.
    fn is_over(&self) -> bool {
        matches!(self.of_servers(), Some(ClientError::Over { .. }))
    }

    /// Returns true if the cause lies in this trainer, so that the servers are to be notified.
    fn is_own(&self) -> bool {
        self.of_servers().is_none_or(ClientError::is_own)
    }

    fn of_servers(&self) -> Option<&ClientError> {
        match self {
            Self::Begin(UpdateError::Servers(error))
            | Self::Update { source: UpdateError::Servers(error), .. }
            | Self::Leave(UpdateError::Servers(error)) => Some(error),
            _ => None,
        }
    }
}

/// Returns the outcome of a trainer that came to an elastic job when the others had finished it.
fn nothing_left(error: &TrainError) -> Outcome {
    tracing::info!("{}; done", chain(error));
    Outcome::Finished(ReplicaResult::default())
}

/// How the steps of a trainer ended.
enum Ended {
    Finished(ReplicaResult),
    /// Asked to stop, after so many examples and with these metrics.
    Stopped(u64, Metrics),
}

/// Trains `workload` as `plan` says. `connect` gets the model's parameters and the number of steps;
/// `ready` is called when the first step is about to begin; `stop` is asked before each step.
///
/// # Errors
/// See [`TrainError`].
pub fn train<W: Workload, U: Updater>(
    workload: &W,
    plan: &Plan,
    connect: impl FnOnce(Flat, u64) -> Result<U, UpdateError>,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Outcome, TrainError> {
    let examples = workload.training_set().examples();
    // Batches that are dealt one by one are those that one trainer alone would read.
    let trainers = if plan.elastic { 1 } else { plan.trainers };
    let split = Split { examples, batch: plan.batch, trainers, seed: plan.seed };
    let total = plan.total_steps(split.steps_per_epoch()?);
    let sampler = split.sampler(plan.reader())?;

    // The values are drawn on the CPU: a device has a generator of its own, and all trainers must
    // begin with the same values.
    tch::manual_seed(plan.seed as i64);
    let mut store = nn::VarStore::new(Device::Cpu);
    let model = workload.model(&store.root());
    store.set_device(plan.device);

    let connected = connect(Flat::of(&store), total).map_err(TrainError::Begin);
    let mut updater = match connected {
        Err(error) if error.is_over() => return Ok(nothing_left(&error)),
        connected => connected?,
    };
    ready();
    let steps = Steps { workload, plan, model: &model, split, total };
    // A workload's panic is reported as well: the servers would look for this trainer else.
    let ended = panic::catch_unwind(AssertUnwindSafe(|| steps.train(sampler, &mut updater, stop)));
    let ended = match ended {
        Ok(Ok(ended)) => ended,
        Ok(Err(error)) if error.is_over() => return Ok(nothing_left(&error)),
        Ok(Err(error)) => {
            if error.is_own() {
                updater.fail(chain(&error));
            }
            return Err(error);
        }
        Err(panic) => {
            updater.fail("its program came to a point where it could not go on; its log says which".to_owned());
            panic::resume_unwind(panic)
        }
    };
    match ended {
        Ended::Stopped(examples, metrics) => {
            updater.leave(false, examples, &metrics).map_err(TrainError::Leave)?;
            Ok(Outcome::Stopped)
        }
        Ended::Finished(result) => {
            let left = updater.leave(true, result.examples, &result.metrics);
            // A server that does not hear of the end takes nothing back. Another process with this trainer's place saves its own.
            let is_replaced = matches!(left, Err(UpdateError::Servers(ClientError::Conflict { .. })));
            if let Some(file) = plan.save.as_ref().filter(|_| plan.trainer == 0 && !is_replaced) {
                let saved = workload.save(&model, &store, file);
                saved.map_err(|source| TrainError::Save { file: file.clone(), source })?;
            }
            left.map_err(TrainError::Leave)?;
            Ok(Outcome::Finished(result))
        }
    }
}

/// The steps of one trainer.
struct Steps<'a, W: Workload> {
    workload: &'a W,
    plan: &'a Plan,
    model: &'a W::Model,
    split: Split,
    total: u64,
}

impl<W: Workload> Steps<'_, W> {
    /// Does every step until the last one, or until `stop`.
    fn train(
        &self,
        sampler: Sampler,
        updater: &mut impl Updater,
        stop: impl Fn() -> bool,
    ) -> Result<Ended, TrainError> {
        let &Self { workload, plan, model, split, total } = self;
        let first = updater.next_step();
        let mut feed = BatchPrefetch::new(workload, plan, split, sampler, first..total);
        let mut progress = Progress::new(total, plan.log_every, Instant::now());
        let mut clock = StepClock::new(plan.device, Instant::now());
        let mut evaluated = Instant::now();
        let mut step = first;
        let mut warned = false;
        loop {
            if stop() {
                return Ok(Ended::Stopped(progress.examples(), progress.metrics()));
            }
            let turn = match feed.prepare(step, updater) {
                Ok(Some(turn)) => turn,
                Ok(None) => match updater.settle() {
                    Ok(None) => {
                        // In an elastic job this trainer has waited for the others' last batches, too.
                        if !plan.elastic {
                            progress.settled(Instant::now());
                        }
                        break;
                    }
                    Ok(Some(next)) => {
                        step = next;
                        continue;
                    }
                    Err(UpdateError::Servers(ClientError::Interrupted)) => continue, // As below.
                    Err(source) => return Err(TrainError::Update { step, source }),
                },
                Err(UpdateError::Servers(ClientError::Interrupted)) => continue, // As below.
                Err(source) if step == first => return Err(TrainError::Begin(source)),
                Err(source) => return Err(TrainError::Update { step, source }),
            };
            step = turn.step;
            let (began, waited, examples) = (Instant::now(), updater.waiting(), feed.examples(step));
            clock.begin(waited, began);
            let batch = feed.next_batch().map_err(|source| TrainError::Data { step, source })?;
            clock.end(Part::Data, waited, Instant::now());
            tch::manual_seed(dropout_seed(plan, turn.number));
            let (losses, updated) = self.update(turn, batch, updater, &mut clock);
            if let Err(UpdateError::Servers(ClientError::Interrupted)) = updated {
                continue; // The loop asks `stop` and leaves.
            }
            // Read late, so that a GPU need not be waited for twice. Servers refuse the gradient of a loss
            // that is not finite; that it is not finite says more.
            let loss = losses.mean();
            clock.end(Part::Backward, updater.waiting(), Instant::now());
            if !loss.is_finite() {
                if plan.non_finite == NonFinite::Refuse {
                    return Err(TrainError::Diverged { step, loss });
                }
                if !std::mem::replace(&mut warned, true) {
                    let rule = plan.non_finite;
                    tracing::warn!(step, loss, ?rule, "the loss is not finite; training goes on, as nonFinite says");
                }
            }
            let next = updated.map_err(|source| TrainError::Update { step, source })?;
            let busy = || began.elapsed().saturating_sub(updater.waiting() - waited);
            plan.rest(step, examples, busy());
            feed.worked(examples, busy());
            step = next;
            let shown = if plan.elastic { turn.number + 1 } else { step };
            let due = progress.step(Done { next: shown, examples, loss, waiting: updater.waiting() }, Instant::now());
            if let Some(point) = progress.take_point() {
                updater.record(shown, &point);
            }
            if due {
                updater.report(progress.examples(), &progress.metrics(), clock.spent(Instant::now()));
            }
            if plan.evaluation_is_due(evaluated.elapsed()) && step < total {
                let metrics = tch::no_grad(|| workload.evaluate(model));
                updater.record(shown, &metrics);
                progress.evaluated(step, metrics);
                evaluated = Instant::now();
            }
        }
        drop(feed);
        let mut result = progress.result(updater.waiting());
        // The first trainer evaluates; in an elastic job each does, because the first may have left.
        if plan.trainer == 0 || plan.elastic {
            let metrics = tch::no_grad(|| workload.evaluate(model));
            updater.record(progress.done(), &metrics);
            result.metrics.extend(metrics);
            // JSON has neither NaN nor infinity.
            result.metrics.retain(|_, value| value.is_finite());
        }
        Ok(Ended::Finished(result))
    }

    /// Updates the model by the gradient of `batch`, which is computed micro-batch by micro-batch: what one has taken of memory is
    /// free before the next. Returns their losses, and what the updater says. For `clock` the last backward is still under way.
    fn update(
        &self,
        turn: Turn,
        batch: MicroBatches<<W::Data as Dataset>::Batch>,
        updater: &mut impl Updater,
        clock: &mut StepClock,
    ) -> (Losses, Result<u64, UpdateError>) {
        let mut losses = Losses::default();
        let mut forward = |MicroBatch { batch, examples }| {
            let loss = self.loss(batch);
            losses.add(&loss, examples);
            counted(&loss, examples, self.plan.batch)
        };
        for batch in batch.before {
            let loss = forward(batch);
            clock.end(Part::Forward, updater.waiting(), Instant::now());
            let added = updater.accumulate(&loss);
            clock.end(Part::Backward, updater.waiting(), Instant::now());
            if let Err(error) = added {
                return (losses, Err(error));
            }
        }
        let loss = forward(batch.last);
        clock.end(Part::Forward, updater.waiting(), Instant::now());
        let updated = updater.update(turn, &loss);
        (losses, updated)
    }

    /// The mean loss of a micro-batch, in f32 where autocast is on.
    fn loss(&self, batch: <W::Data as Dataset>::Batch) -> Tensor {
        let compute = || self.workload.loss(self.model, batch);
        if self.plan.autocast { precision::in_bf16(compute).to_kind(Kind::Float) } else { compute() }
    }
}

/// Returns an error with its causes, as `anyhow` writes it.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The mean loss of `examples`, of which a trainer reads `base` in a step on average: micro-batches add up to the mean of a step,
/// servers take the mean of the trainers' gradients, and that is to be the mean of all examples.
fn counted(loss: &Tensor, examples: usize, base: usize) -> Tensor {
    if examples == base { loss.shallow_clone() } else { loss * (examples as f64 / base as f64) }
}

/// Each trainer drops other units at each step, and the same ones when it has to do a step again: so a
/// job that was resumed goes the way of one that was not disturbed. `number` is that of its turn.
fn dropout_seed(plan: &Plan, number: u64) -> i64 {
    let place = (plan.reader() as u64 + 1) << 40 | number;
    (plan.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)) as i64
}
