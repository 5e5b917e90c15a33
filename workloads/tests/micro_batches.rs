//! Micro-batches train as one batch does: their gradients, each by its examples, are that of the step.

mod job;

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Local as LocalTraining, NonFinite, Optimizer, OptimizerKind};
use psjobs_ps::batch::sharing::{Share, Work};
use psjobs_ps::client::{SessionConfig, TimeSpent};
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local;
use psjobs_worker::train::remote::Remote;
use psjobs_worker::train::throttle::Pace;
use psjobs_worker::train::{Outcome, Plan, Turn, UpdateError, Updater, train};
use psjobs_worker::{Metrics, Workload};
use psjobs_workloads::data::mnist::{self, Mnist};
use psjobs_workloads::data::streamed_images::Images;
use psjobs_workloads::model::convnet::ConvNet;
use psjobs_workloads::model::mlp::Mlp;
use psjobs_workloads::workload::digits::Digits;
use tch::nn::{self, ModuleT};
use tch::{Device, TchError, Tensor};

const STEPS: u64 = 4;
const BATCH: usize = 8;

/// Held by each test: the models take their first values from libtorch's one generator.
fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The network of `mnist` without its dropout, which draws other numbers for other batches.
#[derive(Debug)]
struct WithoutDropout(ConvNet);

impl ModuleT for WithoutDropout {
    fn forward_t(&self, images: &Tensor, _train: bool) -> Tensor {
        self.0.forward_t(images, false)
    }
}

/// Records the sizes of the batches that were computed, and what was trained.
struct Recorded<M> {
    digits: Digits<M>,
    sizes: RefCell<Vec<i64>>,
    trained: RefCell<Vec<f32>>,
}

impl<M: ModuleT> Workload for Recorded<M> {
    type Model = M;
    type Data = Images;

    fn training_set(&self) -> Images {
        self.digits.training_set()
    }

    fn model(&self, path: &nn::Path) -> M {
        self.digits.model(path)
    }

    fn loss(&self, model: &M, batch: (Tensor, Tensor)) -> Tensor {
        self.sizes.borrow_mut().push(batch.1.size()[0]);
        self.digits.loss(model, batch)
    }

    fn evaluate(&self, _model: &M) -> Metrics {
        Metrics::new()
    }

    fn save(&self, _model: &M, store: &nn::VarStore, _file: &Path) -> Result<(), TchError> {
        *self.trained.borrow_mut() = Flat::of(store).values();
        Ok(())
    }
}

fn plan(micro_batches: usize) -> Plan {
    Plan {
        epochs: 1,
        max_steps: Some(STEPS),
        batch: BATCH,
        micro_batches,
        autocast: false,
        elastic: false,
        adaptive: false,
        steps_per_exchange: 1,
        non_finite: NonFinite::Refuse,
        seed: 1,
        trainer: 0,
        trainers: 1,
        device: Device::Cpu,
        log_every: 100,
        evaluate_every: None,
        pace: Pace::default(),
        save: Some("is not written".into()),
    }
}

/// Trains a network by `plan`. Returns the sizes of the batches that were computed, the loss of the last step and the parameters.
fn trained<M: ModuleT, U: Updater>(
    build: fn(&nn::Path) -> M,
    plan: &Plan,
    connect: impl FnOnce(Flat, u64) -> Result<U, UpdateError>,
) -> (Vec<i64>, f64, Vec<f32>) {
    let folder = mnist::default_folder().expect("HOME is set");
    let digits = Digits::new(Mnist::open(&folder, Device::Cpu).expect("`make mnist` was run"), build);
    let workload = Recorded { digits, sizes: RefCell::default(), trained: RefCell::default() };
    let outcome = train(&workload, plan, connect, || (), || false).expect("trains");
    let Outcome::Finished(result) = outcome else { panic!("it was not asked to stop") };
    assert_eq!(result.steps, STEPS);
    (workload.sizes.into_inner(), result.metrics["loss"], workload.trained.into_inner())
}

fn assert_near(label: &str, found: &[f32], want: &[f32]) {
    assert_eq!(found.len(), want.len(), "{label}");
    let furthest = found.iter().zip(want).map(|(found, want)| (found - want).abs()).fold(0.0, f32::max);
    assert!(furthest <= 1e-6, "{label}: {furthest} away from one batch a step");
}

fn sgd() -> Optimizer {
    Optimizer { learning_rate: 0.05, ..Optimizer::default() }
}

/// Four micro-batches of two examples against one batch of eight, by libtorch's rule and by the servers'.
fn compare_alone<M: ModuleT>(label: &str, build: fn(&nn::Path) -> M) {
    // It divides a gradient by the root of this and more, so that what was rounded stays small.
    let adagrad = Optimizer { kind: OptimizerKind::Adagrad, initial_accumulator: 1.0, ..sgd() };
    for optimizer in [sgd(), adagrad] {
        let alone = |micro_batches| trained(build, &plan(micro_batches), |flat, _| Ok(Local::new(flat, &optimizer)?));
        let (whole, in_parts) = (alone(1), alone(4));
        assert_eq!(whole.0, [8; STEPS as usize], "{label}");
        assert_eq!(in_parts.0, [2; 4 * STEPS as usize], "{label}");
        assert!((whole.1 - in_parts.1).abs() < 1e-5, "{label}: the loss is {} instead of {}", in_parts.1, whole.1);
        assert_near(&format!("{label}, {:?}", optimizer.kind), &in_parts.2, &whole.2);
    }
}

#[test]
fn micro_batches_train_as_one_batch() {
    let _alone = generator();
    compare_alone("mlp", Mlp::new);
    compare_alone("mnist", |path| WithoutDropout(ConvNet::new(path)));
}

/// Trains with a server. The network has several blocks, of which gradients leave while others are computed.
fn with_a_server(micro_batches: usize, training: &Training) -> Vec<f32> {
    let job = job::Job::start(1, 1, training.clone());
    let environment = job.trainer(0);
    let plan = Plan { steps_per_exchange: training.steps_per_exchange(), ..plan(micro_batches) };
    let join = |flat: Flat, steps| {
        let config = SessionConfig::new(&environment, flat.specs(), plan.exchanges(steps));
        Remote::join(config, flat, Device::Cpu, &environment.training, steps)
    };
    let (sizes, _, parameters) = trained(|path| WithoutDropout(ConvNet::new(path)), &plan, join);
    assert_eq!(sizes.len(), STEPS as usize * micro_batches);
    job.join();
    parameters
}

#[test]
fn micro_batches_train_as_one_batch_with_servers() {
    let _alone = generator();
    let training = Training { optimizer: sgd(), ..Training::default() };
    let sync = Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() };
    let overlap = Consistency { overlap: Some(true), ..Consistency::default() };
    for (label, training) in [
        ("an exchange in each step", Training { consistency: sync, ..training.clone() }),
        ("exchanges that overlap", Training { consistency: overlap, ..training.clone() }),
        ("local steps", Training { local: Some(LocalTraining::every(2)), ..training }),
    ] {
        assert_near(label, &with_a_server(4, &training), &with_a_server(1, &training));
    }
}

/// Trains alone, and reads as many examples as server 0 might deal out to a slow trainer.
struct Shared(Local, u32);

impl Updater for Shared {
    fn next_step(&self) -> u64 {
        self.0.next_step()
    }

    fn accumulate(&mut self, loss: &Tensor) -> Result<(), UpdateError> {
        self.0.accumulate(loss)
    }

    fn update(&mut self, turn: Turn, loss: &Tensor) -> Result<u64, UpdateError> {
        self.0.update(turn, loss)
    }

    fn settle(&mut self) -> Result<Option<u64>, UpdateError> {
        self.0.settle()
    }

    fn share(&self, step: u64, _base: u32, _work: Work) -> Result<Option<Share>, UpdateError> {
        Ok(Some(Share { until: step + STEPS, offset: 0, examples: self.1 }))
    }

    fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
        self.0.next_batch()
    }

    fn entries(&self) -> u64 {
        self.0.entries()
    }

    fn report(&mut self, examples: u64, metrics: &Metrics, spent: TimeSpent) {
        self.0.report(examples, metrics, spent);
    }

    fn record(&mut self, step: u64, metrics: &Metrics) {
        self.0.record(step, metrics);
    }

    fn waiting(&self) -> Duration {
        self.0.waiting()
    }

    fn leave(self, finished: bool, examples: u64, metrics: &Metrics) -> Result<(), UpdateError> {
        self.0.leave(finished, examples, metrics)
    }

    fn fail(self, failure: String) {
        self.0.fail(failure);
    }
}

#[test]
fn shares_that_micro_batches_do_not_divide_train_as_one_batch() {
    let _alone = generator();
    let with_share = |micro_batches, examples| {
        let plan = Plan { adaptive: true, ..plan(micro_batches) };
        trained(Mlp::new, &plan, |flat, _| Ok(Shared(Local::new(flat, &sgd())?, examples)))
    };
    for (examples, want) in [(7, &[2, 2, 2, 1][..]), (5, &[2, 2, 1]), (1, &[1])] {
        let (whole, in_parts) = (with_share(1, examples), with_share(4, examples));
        assert_eq!(whole.0, [i64::from(examples); STEPS as usize]);
        assert_eq!(in_parts.0, want.repeat(STEPS as usize));
        assert!((whole.1 - in_parts.1).abs() < 1e-5, "the loss is {} instead of {}", in_parts.1, whole.1);
        assert_near(&format!("{examples} examples"), &in_parts.2, &whole.2);
    }
}
