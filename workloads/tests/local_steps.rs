//! Local steps are what their definition says: each trainer makes some steps alone, and the servers move by SGD with
//! Nesterov momentum along the mean of the trainers' differences; with overlap a trainer adds what it has changed meanwhile.

mod job;
mod small_model;

use psjobs_api::training::{Consistency, ConsistencyMode, Local, Optimizer, OptimizerGroup, OptimizerKind};
use psjobs_api::training::{Schedule, ScheduleKind};
use psjobs_api::{Environment, Training};
use psjobs_ps::client::SessionConfig;
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local as Alone;
use psjobs_worker::train::remote::Remote;
use psjobs_worker::train::{Turn, Updater};
use tch::Device;

use small_model::Model;

const TRAINERS: u64 = 2;
const TOTAL: u64 = 11;
const STEPS: u64 = 4;
const OUTER: (f32, f32) = (0.7, 0.9);

/// But with AdamW, which is then libtorch's own, some parameters are in a group with another rate: that is the trainers' matter.
fn training(kind: OptimizerKind, overlap: bool) -> Training {
    let slower = OptimizerGroup { parameters: "*.bias".into(), learning_rate_factor: 0.5, weight_decay: None };
    let groups = if kind == OptimizerKind::AdamW { Vec::new() } else { vec![slower] };
    Training {
        consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
        optimizer: Optimizer { kind, learning_rate: 0.05, groups, ..Optimizer::default() },
        local: Some(Local {
            overlap,
            learning_rate: OUTER.0.into(),
            momentum: Some(OUTER.1.into()),
            ..Local::every(STEPS as u32)
        }),
        schedule: Schedule { kind: ScheduleKind::Linear, total_steps: TOTAL, ..Schedule::default() },
        ..Training::default()
    }
}

/// All trainers and the servers in one process, as the equations have them.
fn by_the_equations(training: &Training) -> Vec<f32> {
    let models: Vec<Model> = (0..TRAINERS).map(|_| Model::new(TOTAL)).collect();
    let alone = |model: &Model| {
        let alone = Alone::new(Flat::of(&model.store), &training.optimizer).expect("usable");
        alone.with_schedule((&training.schedule).into())
    };
    let mut optimizers: Vec<Alone> = models.iter().map(alone).collect();
    let mut parameters = Flat::of(&models[0].store).values();
    let mut velocity = vec![0.0_f32; parameters.len()];
    // Where the trainers began, and with overlap what they changed last, which the servers' parameters do not have yet.
    let mut began = vec![parameters.clone(); models.len()];
    for first in (0..TOTAL).step_by(STEPS as usize) {
        let mut mean = vec![0.0_f32; parameters.len()];
        let mut changes = Vec::new();
        for (trainer, (model, optimizer)) in (0..).zip(models.iter().zip(&mut optimizers)) {
            for step in first..(first + STEPS).min(TOTAL) {
                optimizer.step(step, &model.loss(trainer, step)).expect("a step");
            }
            let values = Flat::of(&model.store).values();
            let change: Vec<f32> = began[trainer as usize].iter().zip(values).map(|(b, v)| b - v).collect();
            mean.iter_mut().zip(&change).for_each(|(m, c)| *m += c / TRAINERS as f32);
            changes.push(change);
        }
        // Exchanges that overlap come back after the steps that follow.
        let known = parameters.clone();
        for ((p, v), d) in parameters.iter_mut().zip(&mut velocity).zip(&mean) {
            *v = OUTER.1 * *v + d;
            *p -= OUTER.0 * (d + OUTER.1 * *v);
        }
        let overlap = training.local.as_ref().is_some_and(|local| local.overlap) && first + STEPS < TOTAL;
        for ((model, began), change) in models.iter().zip(&mut began).zip(changes) {
            *began = if overlap { known.iter().zip(change).map(|(k, c)| k - c).collect() } else { parameters.clone() };
            Flat::of(&model.store).set(began);
        }
    }
    parameters
}

/// Trains until `end`, and leaves as one that was replaced or as one that has finished.
fn train(environment: &Environment, end: u64) -> Vec<f32> {
    let model = Model::new(TOTAL);
    let (flat, training) = (Flat::of(&model.store), &environment.training);
    let config = SessionConfig::new(environment, flat.specs(), TOTAL.div_ceil(STEPS));
    let mut remote = Remote::join(config, flat, Device::Cpu, training, TOTAL).expect("joined");
    let mut step = remote.next_step();
    while step < end {
        let loss = model.loss(environment.index.into(), step);
        step = remote.update(Turn { step, number: step }, &loss).expect("updated");
        assert_eq!(remote.next_step(), step);
    }
    remote.leave(end == TOTAL, TOTAL, &Default::default()).expect("left");
    Flat::of(&model.store).values()
}

#[test]
fn trainers_that_make_steps_alone_end_where_the_equations_do() {
    let rows = [
        (OptimizerKind::Sgd, false),
        (OptimizerKind::AdamW, false),
        (OptimizerKind::Adagrad, false),
        (OptimizerKind::Sgd, true),
        (OptimizerKind::AdamW, true),
    ];
    for (kind, overlap) in rows {
        let training = training(kind, overlap);
        let want = by_the_equations(&training);
        let job = job::Job::start(2, TRAINERS as u32, training);
        let trainers = (0..TRAINERS as u32).map(|trainer| job.trainer(trainer));
        let threads: Vec<_> = trainers.map(|trainer| std::thread::spawn(move || train(&trainer, TOTAL))).collect();
        let found: Vec<Vec<f32>> = threads.into_iter().map(|thread| thread.join().expect("a trainer")).collect();
        for (place, found) in found.iter().enumerate() {
            let furthest = found.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(
                furthest <= 1e-5,
                "{kind:?}, overlap {overlap}, trainer {place}: {furthest} away from the equations"
            );
        }
        // Servers count exchanges, and report the trainers' steps.
        for result in job.join() {
            assert_eq!(result.steps, TRAINERS * TOTAL.div_ceil(STEPS) * STEPS, "{kind:?}");
        }
    }
}

#[test]
fn a_replaced_trainer_makes_the_steps_of_an_open_exchange_again() {
    // SGD has no state that could be lost with a trainer.
    let training = training(OptimizerKind::Sgd, false);
    let want = by_the_equations(&training);
    let job = job::Job::start(1, TRAINERS as u32, training);
    let steady = job.trainer(0);
    let steady = std::thread::spawn(move || train(&steady, TOTAL));
    // It leaves in the middle of its second exchange.
    let first = job.trainer(1);
    train(&first, STEPS + 2);
    let found = train(&Environment { incarnation: 1, ..first }, TOTAL);
    for found in [steady.join().expect("a trainer"), found] {
        let furthest = found.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest <= 1e-5, "{furthest} away from the equations");
    }
    job.join();
}
