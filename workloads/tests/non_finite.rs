//! A loss that is not finite ends a trainer, or its step is left out, as `spec.training.nonFinite` says.

mod job;

use std::cell::Cell;

use psjobs_api::Training;
use psjobs_api::training::{Local as LocalTraining, NonFinite, Optimizer, OptimizerKind};
use psjobs_ps::client::SessionConfig;
use psjobs_worker::data::Dataset;
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local;
use psjobs_worker::train::remote::Remote;
use psjobs_worker::train::throttle::Pace;
use psjobs_worker::train::{Outcome, Plan, TrainError, UpdateError, Updater, train};
use psjobs_worker::{Metrics, Workload};
use tch::nn::{self, Init};
use tch::{Device, Kind, Tensor};

const STEPS: u64 = 3;

/// Examples without contents.
struct Examples;

impl Dataset for Examples {
    type Batch = ();

    fn examples(&self) -> usize {
        STEPS as usize
    }

    fn batch(&self, _examples: &[i64]) {}
}

/// A number that is to become 1. The loss of the second step is infinite.
#[derive(Default)]
struct Number {
    losses: Cell<u64>,
}

impl Workload for Number {
    type Model = Tensor;
    type Data = Examples;

    fn training_set(&self) -> Examples {
        Examples
    }

    fn model(&self, path: &nn::Path) -> Tensor {
        path.var("number", &[1], Init::Const(0.0))
    }

    fn loss(&self, model: &Tensor, (): ()) -> Tensor {
        let factor = if self.losses.replace(self.losses.get() + 1) == 1 { f64::INFINITY } else { 1.0 };
        (model - 1.0).square().mean(Kind::Float) * factor
    }

    fn evaluate(&self, model: &Tensor) -> Metrics {
        Metrics::from([("number".to_owned(), model.double_value(&[0]))])
    }
}

fn plan(non_finite: NonFinite) -> Plan {
    Plan {
        epochs: 1,
        max_steps: None,
        batch: 1,
        micro_batches: 1,
        autocast: false,
        elastic: false,
        adaptive: false,
        steps_per_exchange: 1,
        non_finite,
        seed: 1,
        trainer: 0,
        trainers: 1,
        device: Device::Cpu,
        log_every: 1,
        evaluate_every: None,
        pace: Pace::default(),
        save: None,
    }
}

/// Returns the metrics at the end.
fn trained<U: Updater>(
    plan: &Plan,
    connect: impl FnOnce(Flat, u64) -> Result<U, UpdateError>,
) -> Result<Metrics, TrainError> {
    let outcome = train(&Number::default(), plan, connect, || (), || false)?;
    let Outcome::Finished(result) = outcome else { panic!("it was not asked to stop") };
    assert_eq!(result.steps, STEPS);
    Ok(result.metrics)
}

fn optimizer(kind: OptimizerKind) -> Optimizer {
    Optimizer { kind, learning_rate: 0.1, momentum: 0.0, ..Optimizer::default() }
}

fn with_a_server(training: Training) -> Metrics {
    let job = job::Job::start(1, 1, training);
    let environment = job.trainer(0);
    let training = &environment.training;
    let plan = Plan { steps_per_exchange: training.steps_per_exchange(), ..plan(training.non_finite) };
    let join = |flat: Flat, steps| {
        let config = SessionConfig::new(&environment, flat.specs(), plan.exchanges(steps));
        Remote::join(config, flat, Device::Cpu, training, steps)
    };
    let metrics = trained(&plan, join).expect("the step is left out");
    job.join();
    metrics
}

#[test]
fn a_job_that_skips_goes_on_after_a_loss_that_is_not_finite() {
    let training =
        Training { non_finite: NonFinite::Skip, optimizer: optimizer(OptimizerKind::Sgd), ..Training::default() };
    let metrics = with_a_server(training.clone());
    // Two of the three steps, each a fifth of the way.
    assert!((metrics["number"] - 0.36).abs() < 1e-6, "{metrics:?}");
    assert!((metrics["loss"] - 0.64).abs() < 1e-6, "{metrics:?}");

    let metrics = with_a_server(Training { local: Some(LocalTraining::every(STEPS as u32)), ..training });
    assert!(metrics["number"] > 0.0, "{metrics:?}");
}

#[test]
fn an_optimizer_of_the_trainer_leaves_out_a_gradient_that_is_not_finite() {
    for kind in [OptimizerKind::Sgd, OptimizerKind::Adam, OptimizerKind::Adagrad] {
        let alone = |flat: Flat, _: u64| -> Result<Local, UpdateError> {
            let local = Local::new(flat, &optimizer(kind))?;
            Ok(local.with_non_finite(NonFinite::Skip))
        };
        let metrics = trained(&plan(NonFinite::Skip), alone).expect("the step is left out");
        assert!(metrics["number"] > 0.0, "{kind:?}: {metrics:?}");
    }
}

#[test]
fn a_job_that_refuses_ends_at_the_first_loss_that_is_not_finite() {
    let alone = |flat, _| Local::new(flat, &optimizer(OptimizerKind::Sgd)).map_err(UpdateError::from);
    let error = trained(&plan(NonFinite::Refuse), alone).expect_err("it ends");
    assert!(matches!(error, TrainError::Diverged { step: 1, .. }), "{error}");
}
