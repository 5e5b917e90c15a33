//! Measures the cost of the wire: a step that sends all gradients, applies them by SGD and brings all parameters
//! back, over raw TCP that sends as many bytes of f32 and receives as many, in turn.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use psjobs_api::training::{Codec, Compression, ConsistencyMode, Optimizer, OptimizerKind};
use psjobs_api::{Environment, Role, Training};
use psjobs_ps::client::{Session, SessionConfig, TensorSpec};
use psjobs_ps::network::Network;
use psjobs_ps::server::{self, ServerConfig};
use tokio::runtime::Runtime;

use crate::report::{Case, say};
use psjobs::certificates;

/// Steps/s of a model without its computing, over raw TCP in turn
#[derive(Debug, Args)]
pub struct WireArgs {
    /// Size of the parameters in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Steps of each run
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

/// One way to exchange.
struct Way {
    case: &'static str,
    trainers: u32,
    shared_memory: bool,
    codec: Codec,
    tls: bool,
    connections: u32,
    /// In Sync, with the previous values kept.
    exact_recovery: bool,
}

/// One trainer, over TCP.
const PLAIN: Way = Way {
    case: "tcp-f32",
    trainers: 1,
    shared_memory: false,
    codec: Codec::F32,
    tls: false,
    connections: 1,
    exact_recovery: false,
};

const WAYS: [Way; 8] = [
    PLAIN,
    Way { case: "shm-f32", shared_memory: true, ..PLAIN },
    Way { case: "tcp-bf16", codec: Codec::BF16, ..PLAIN },
    Way { case: "tcp-f32-2-trainers", trainers: 2, ..PLAIN },
    Way { case: "tls-f32", tls: true, ..PLAIN },
    Way { case: "tls-f32-2-connections", tls: true, connections: 2, ..PLAIN },
    Way { case: "tcp-f32-exact-recovery", exact_recovery: true, ..PLAIN },
    Way { case: "shm-f32-exact-recovery", shared_memory: true, exact_recovery: true, ..PLAIN },
];

/// Steps before the clock starts: connections grow, memory is touched.
pub(super) const WARM_UP: u32 = 2;

impl WireArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        WAYS.iter().map(|way| self.case(way, runs)).collect()
    }

    fn case(&self, way: &Way, runs: u32) -> anyhow::Result<Case> {
        let (mut values, mut limits) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("wire {}: run {run} of {runs}", way.case));
            limits.push(self.raw()?);
            values.push(self.exchange(way)?);
        }
        Ok(Case::new("wire", way.case, "steps/s", &values, &limits))
    }

    fn elements(&self) -> usize {
        self.megabytes as usize * 250_000
    }

    /// Steps/s of all trainers together.
    fn exchange(&self, way: &Way) -> anyhow::Result<f64> {
        let runtime = Runtime::new().context("cannot start a runtime")?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).context("no free port")?;
        let certificates = tempfile::tempdir().context("no temporary folder")?;
        let folder = certificates.path();
        if way.tls {
            certificates::write(folder)?;
        }
        let mut training = training(way.codec);
        if way.exact_recovery {
            training.consistency.mode = ConsistencyMode::Sync;
            training.consistency.exact_recovery = Some(true);
        }
        let servers = vec![listener.local_addr().context("bound")?.to_string()];
        let environment = Environment {
            tls_folder: way.tls.then(|| folder.join(Role::Server.as_str()).display().to_string()),
            connections: Some(way.connections),
            ..Environment::new("bench-wire", "bench-wire", servers, way.trainers, training)
        };
        let config = ServerConfig { network: Network::of(&environment)?, ..ServerConfig::new(&environment) };
        let server = runtime.spawn(server::run(listener, config, std::future::pending()));
        let tls_folder = way.tls.then(|| folder.join(Role::Trainer.as_str()).display().to_string());
        let trainers = Environment { tls_folder, ..environment };
        let slowest = train_all(&trainers, self.elements(), self.steps, way.shared_memory)?;
        runtime.block_on(server).context("the server panicked")??;
        Ok(f64::from(self.steps * way.trainers) / slowest.as_secs_f64())
    }

    /// Steps/s of plain sockets.
    fn raw(&self) -> anyhow::Result<f64> {
        let bytes = self.elements() * 4;
        let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
        let address = listener.local_addr().context("bound")?;
        let rounds = WARM_UP + self.steps;
        let echo = thread::spawn(move || -> std::io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            let mut buffer = vec![0; bytes];
            for _ in 0..rounds {
                stream.read_exact(&mut buffer)?;
                stream.write_all(&buffer)?;
            }
            Ok(())
        });
        let mut stream = TcpStream::connect(address).context("cannot connect to this machine")?;
        stream.set_nodelay(true)?;
        let mut buffer = vec![1; bytes];
        let mut start = Instant::now();
        for round in 0..rounds {
            if round == WARM_UP {
                start = Instant::now();
            }
            stream.write_all(&buffer)?;
            stream.read_exact(&mut buffer)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        echo.join().map_err(|_| anyhow!("the echo panicked"))??;
        Ok(f64::from(self.steps) / seconds)
    }
}

/// SGD, with gradients sent by this codec.
pub(super) fn training(codec: Codec) -> Training {
    Training {
        optimizer: Optimizer { kind: OptimizerKind::Sgd, ..Optimizer::default() },
        compression: Compression { codec, ..Compression::default() },
        ..Training::default()
    }
}

/// Trains as all trainers of a job, on a model of so many elements. Returns how long the slowest took for its steps after
/// those that warm up.
pub(super) fn train_all(
    job: &Environment,
    elements: usize,
    steps: u32,
    shared_memory: bool,
) -> anyhow::Result<Duration> {
    let barrier = Barrier::new(job.trainers as usize);
    thread::scope(|scope| {
        let trainer = |index| {
            let place = Environment { role: Role::Trainer, index, ..job.clone() };
            let barrier = &barrier;
            scope.spawn(move || train(&place, elements, steps, shared_memory, barrier))
        };
        let trainers: Vec<_> = (0..job.trainers).map(trainer).collect();
        trainers.into_iter().try_fold(Duration::ZERO, |slowest, trainer| {
            Ok(slowest.max(trainer.join().map_err(|_| anyhow!("a trainer panicked"))??))
        })
    })
}

fn train(
    place: &Environment,
    elements: usize,
    steps: u32,
    shared_memory: bool,
    barrier: &Barrier,
) -> anyhow::Result<Duration> {
    let tensors = vec![TensorSpec::new("weight", vec![elements as u64])];
    let config = SessionConfig::new(place, tensors, u64::from(WARM_UP + steps));
    let config = SessionConfig { shared_memory, network: Network::of(place)?, ..config };
    let mut session = Session::join(config, &vec![1.0; elements])?;
    session.gradients_mut().iter_mut().zip(0_u32..).for_each(|(g, i)| *g = (i % 1000) as f32 * 1e-3);
    let mut start = Instant::now();
    for step in 0..WARM_UP + steps {
        if step == WARM_UP {
            barrier.wait();
            start = Instant::now();
        }
        session.exchange(step.into())?;
    }
    let elapsed = start.elapsed();
    session.leave(true, 0, Default::default())?;
    Ok(elapsed)
}
