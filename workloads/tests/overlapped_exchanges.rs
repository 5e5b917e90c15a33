//! Exchanges that overlap are what their definition says: a gradient is computed while the exchange of the one before is under
//! way, with the parameters of the exchange before that one. Servers that go back take both along.

mod job;
mod small_model;

use std::future::pending;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, Staleness, StalenessPolicy};
use psjobs_api::{Environment, ReplicaResult, Role, Training};
use psjobs_ps::checkpoint::Runs;
use psjobs_ps::client::SessionConfig;
use psjobs_ps::server::{self, CheckpointConfig, ServerConfig, ServerError};
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::remote::Remote;
use psjobs_worker::train::{Turn, Updater};
use tch::{Device, Kind, Tensor};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use small_model::Model;

const TRAINERS: u64 = 2;
const STEPS: u64 = 9;
const LEARNING_RATE: f32 = 0.125;

/// No trainer is answered until all have given the same step.
fn training() -> Training {
    let bounded = ConsistencyMode::Bounded;
    Training {
        consistency: Consistency { mode: bounded, staleness: 0, overlap: Some(true), ..Consistency::default() },
        optimizer: Optimizer { learning_rate: LEARNING_RATE.into(), ..Optimizer::default() },
        staleness: Staleness { policy: Some(StalenessPolicy::None), ..Staleness::default() },
        ..Training::default()
    }
}

impl Model {
    fn values(&self) -> Vec<f32> {
        Flat::of(&self.store).values()
    }

    /// A loss whose gradient is 1 everywhere.
    fn sum(&self) -> Tensor {
        let flat = Flat::of(&self.store);
        flat.parameters().iter().map(|parameter| parameter.tensor.sum(Kind::Float)).sum()
    }

    fn join(&self, environment: &Environment) -> Remote {
        let flat = Flat::of(&self.store);
        let config = SessionConfig::new(environment, flat.specs(), STEPS);
        Remote::join(config, flat, Device::Cpu, &environment.training, STEPS).expect("joined")
    }
}

/// All trainers and the servers in one process, as the equations have them.
fn by_the_equations() -> Vec<f32> {
    let model = Model::new(STEPS);
    let mut flat = Flat::of(&model.store);
    let mut servers = flat.values();
    let mut taken = servers.clone();
    for step in 0..STEPS {
        flat.set(&taken);
        // The exchange of the step before ends when this step's gradient is there.
        taken.clone_from(&servers);
        for trainer in 0..TRAINERS {
            let gradients = flat.gradients(&model.loss(trainer, step)).expect("computes");
            for (parameter, gradient) in flat.parameters().iter().zip(gradients) {
                let mut values = vec![0.0_f32; parameter.range.len()];
                gradient.copy_data(&mut values, parameter.range.len());
                let updated = servers[parameter.range.clone()].iter_mut();
                updated.zip(values).for_each(|(value, gradient)| *value -= LEARNING_RATE * gradient);
            }
        }
    }
    servers
}

#[test]
fn gradients_that_overlap_exchanges_are_those_of_the_equations() {
    let job = job::Job::start(2, TRAINERS as u32, training());
    let models: Vec<Model> = (0..TRAINERS).map(|_| Model::new(STEPS)).collect();
    let joined = |(trainer, model): (u32, &Model)| model.join(&job.trainer(trainer));
    let mut trainers: Vec<Remote> = (0..).zip(&models).map(joined).collect();
    for step in 0..STEPS {
        for (trainer, (model, remote)) in (0..).zip(models.iter().zip(&mut trainers)) {
            // The exchange of this step waits for the other trainer, which is on the same thread.
            let next = remote.update(Turn { step, number: step }, &model.loss(trainer, step)).expect("updated");
            assert_eq!((next, remote.next_step()), (step + 1, step + 1), "trainer {trainer}");
        }
    }
    let want = by_the_equations();
    for (model, mut remote) in models.iter().zip(trainers) {
        assert_eq!(remote.settle().expect("settled"), None);
        let furthest = model.values().iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest <= 1e-5, "{furthest} away from the equations");
        remote.leave(true, STEPS, &Default::default()).expect("left");
    }
    for result in job.join() {
        assert_eq!(result.steps, TRAINERS * STEPS);
    }
}

/// A server with a runtime of its own, so that it can die with all its tasks and connections.
struct Server {
    runtime: Runtime,
    ended: JoinHandle<Result<ReplicaResult, ServerError>>,
}

impl Server {
    fn start(listener: TcpListener, environment: &Environment, folder: &Path) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let mut config = ServerConfig::new(environment);
        config.checkpoint = Some(CheckpointConfig {
            job: "test".into(),
            incarnation: environment.incarnation,
            folder: folder.into(),
            interval: Duration::from_millis(50),
            keep: 2,
            resume: true,
            servers: environment.servers.clone(),
        });
        listener.set_nonblocking(true).expect("a socket");
        let listener = runtime.block_on(async { tokio::net::TcpListener::from_std(listener) }).expect("a socket");
        let ended = runtime.spawn(server::run(listener, config, pending()));
        Self { runtime, ended }
    }
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "it takes too long: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_gradient_that_was_computed_before_the_servers_went_back_is_dropped() {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let first = Environment::new("test", "test", vec![address.to_string()], 1, training());
    let mut server = Server::start(listener, &first, folder.path());
    let model = Model::new(STEPS);
    let before = model.values();
    let mut remote = model.join(&Environment { role: Role::Trainer, ..first.clone() });
    let (mut step, mut rewinds) = (0, 0);
    loop {
        while step < STEPS {
            let next = remote.update(Turn { step, number: step }, &model.sum()).expect("updated");
            rewinds += u32::from(next != step + 1);
            step = next;
            if step == STEPS / 2 && rewinds == 0 {
                until("a checkpoint", || {
                    let run = Runs::new(folder.path()).newest().expect("a folder")?;
                    run.complete().expect("a folder").last().copied().filter(|step| *step > 0)
                });
                server.runtime.shutdown_timeout(Duration::from_secs(5));
                let listener = until("the port is free", || TcpListener::bind(address).ok());
                let again = Environment { incarnation: 1, ..first.clone() };
                server = Server::start(listener, &again, folder.path());
            }
        }
        match remote.settle().expect("settled") {
            None => break,
            Some(next) => (step, rewinds) = (next, rewinds + 1),
        }
    }
    assert!(rewinds > 0, "the server has gone back");
    let furthest =
        model.values().into_iter().zip(&before).map(|(now, before)| now - before + STEPS as f32 * LEARNING_RATE);
    let furthest = furthest.map(f32::abs).fold(0.0, f32::max);
    assert!(furthest <= 1e-5, "{furthest} away from {STEPS} updates of {LEARNING_RATE}");
    remote.leave(true, STEPS, &Default::default()).expect("left");
    let result = server.runtime.block_on(server.ended).expect("no panic").expect("ends well");
    assert_eq!(result.steps, STEPS);
}
