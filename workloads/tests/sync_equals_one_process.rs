//! Sync training is what its definition says: N trainers with batch B do what one process does that
//! accumulates their gradients in the order of the trainers, bit for bit.

mod job;

use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer};
use psjobs_api::{Environment, Training};
use psjobs_ps::client::SessionConfig;
use psjobs_worker::Workload;
use psjobs_worker::data::Dataset;
use psjobs_worker::data::sampler::{Sampler, Split};
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::remote::Remote;
use psjobs_worker::train::{Turn, Updater};
use psjobs_workloads::data::mnist::{self, Mnist};
use psjobs_workloads::model::mlp::Mlp;
use psjobs_workloads::workload::digits::Digits;
use tch::nn::VarStore;
use tch::{Device, Tensor, no_grad};

const STEPS: u64 = 20;
const LEARNING_RATE: f64 = 0.1;
const TRAINERS: usize = 2;
const BATCH: usize = 16;

type Net = Digits<Mlp>;

fn workload() -> Net {
    let folder = mnist::default_folder().expect("HOME is set");
    Digits::new(Mnist::open(&folder, Device::Cpu).expect("`make mnist` was run"), Mlp::new)
}

/// A model with the values that seed 1 gives.
fn model(workload: &Net) -> (VarStore, Mlp) {
    tch::manual_seed(1);
    let store = VarStore::new(Device::Cpu);
    let model = workload.model(&store.root());
    (store, model)
}

fn sampler(workload: &Net, batch: usize, trainers: usize, trainer: usize) -> Sampler {
    let split = Split { examples: workload.training_set().examples(), batch, trainers, seed: 1 };
    split.sampler(trainer).expect("60,000 examples are enough")
}

/// One process: in every step the mean of the samplers' gradients, added in their order.
fn one_process(workload: &Net, mut samplers: Vec<Sampler>) -> Vec<f32> {
    let (store, model) = model(workload);
    let flat = Flat::of(&store);
    for step in 0..STEPS {
        let mut sum: Option<Vec<Tensor>> = None;
        for sampler in &mut samplers {
            let gradients = flat
                .gradients(&workload.loss(&model, workload.training_set().batch(sampler.batch(step))))
                .expect("computes");
            sum = Some(match sum {
                None => gradients,
                Some(sum) => sum.into_iter().zip(gradients).map(|(sum, gradient)| sum + gradient).collect(),
            });
        }
        no_grad(|| {
            for (parameter, sum) in flat.parameters().iter().zip(sum.expect("there is a sampler")) {
                let mut tensor = parameter.tensor.shallow_clone();
                tensor -= (sum / samplers.len() as f64) * LEARNING_RATE;
            }
        });
    }
    flat.values()
}

/// Two trainers in Sync mode, each in a thread, with `servers` real servers.
fn with_servers(workload: &Net, servers: u32) -> Vec<Vec<f32>> {
    let training = Training {
        consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
        optimizer: Optimizer { learning_rate: LEARNING_RATE, ..Optimizer::default() },
        ..Training::default()
    };
    let job = job::Job::start(servers, TRAINERS as u32, training);
    // Models are made before the threads are: they would share libtorch's generator.
    let trainers: Vec<_> = (0..TRAINERS)
        .map(|trainer| {
            let environment = job.trainer(trainer as u32);
            let sampler = sampler(workload, BATCH, TRAINERS, trainer);
            let data = self::workload();
            let model = model(workload);
            std::thread::spawn(move || trainer_thread(&environment, &data, model, sampler))
        })
        .collect();
    let parameters = trainers.into_iter().map(|thread| thread.join().expect("a trainer")).collect();
    for result in job.join() {
        assert_eq!(result.steps, STEPS * TRAINERS as u64);
    }
    parameters
}

fn trainer_thread(environment: &Environment, workload: &Net, model: (VarStore, Mlp), mut sampler: Sampler) -> Vec<f32> {
    tch::set_num_threads(1);
    let (store, model) = model;
    let flat = Flat::of(&store);
    let config = SessionConfig::new(environment, flat.specs(), STEPS);
    let mut remote = Remote::join(config, flat, Device::Cpu, &environment.training, STEPS).expect("joined");
    for step in 0..STEPS {
        let loss = workload.loss(&model, workload.training_set().batch(sampler.batch(step)));
        remote.update(Turn { step, number: step }, &loss).expect("exchanged");
    }
    remote.leave(true, STEPS * BATCH as u64, &Default::default()).expect("left");
    Flat::of(&store).values()
}

#[test]
fn two_trainers_in_sync_mode_equal_one_process() {
    tch::set_num_threads(1);
    let workload = workload();
    let halves = (0..TRAINERS).map(|trainer| sampler(&workload, BATCH, TRAINERS, trainer)).collect();
    let accumulated = one_process(&workload, halves);
    let joined = one_process(&workload, vec![sampler(&workload, BATCH * TRAINERS, 1, 0)]);

    for servers in [1, 2] {
        for (trainer, parameters) in with_servers(&workload, servers).into_iter().enumerate() {
            let label = format!("trainer {trainer} of a job with {servers} servers");
            assert_eq!(parameters.len(), accumulated.len(), "{label}");
            let differ = parameters.iter().zip(&accumulated).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{label}: parameters that differ from one process that accumulates");
            let furthest = parameters.iter().zip(&joined).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-5, "{label}: {furthest} away from one process with the joined batch");
        }
    }
}
