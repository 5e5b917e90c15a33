//! How long training stands still when a server is killed: with a second server that holds its blocks, and
//! from a checkpoint. The servers are processes of this program.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use psjobs_api::checkpoint::CheckpointPolicy;
use psjobs_api::env::Checkpoint;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind};
use psjobs_api::{Environment, Role, Training};
use psjobs_ps::checkpoint::Catalog;
use psjobs_ps::client::{Session, SessionConfig, TensorSpec};
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::server::{self, ServerConfig};
use tokio::runtime::Runtime;

use super::{Case, median, say};

/// Seconds until training goes on after kill -9 of a server
#[derive(Debug, Args)]
pub struct RecoveryArgs {
    /// Size of the parameters for `replica` in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Size of the parameters for `checkpoint` in MB
    #[arg(long, value_name = "MB", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    checkpoint_megabytes: u32,
}

/// A run's figure and its limit.
type Measure<'a> = &'a dyn Fn(u32) -> anyhow::Result<(f64, f64)>;

/// Steps before the servers are killed, and after.
const BEFORE: u64 = 10;
const AFTER: u64 = 20;
/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(120);
/// A power of two, as is the learning rate: what the parameters must be can be told exactly.
const GRADIENT: f32 = 0.25;

impl RecoveryArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let cases: [(_, Measure); 2] = [
            // Alternately the server that knows the job, and the other one.
            ("replica", &|run| replica(self.megabytes, (run % 2) as usize)),
            ("checkpoint", &|_| checkpoint(self.checkpoint_megabytes)),
        ];
        let measured = cases.into_iter().map(|(case, measure)| {
            let (mut values, mut limits) = (Vec::new(), Vec::new());
            for run in 1..=runs {
                say(&format!("recovery {case}: run {run} of {runs}"));
                let (value, limit) = measure(run)?;
                values.push(value);
                limits.push(limit);
            }
            Ok(Case::new("recovery", case, "s", &values, &limits))
        });
        measured.collect()
    }
}

/// Seconds from the kill of one of two replicated servers to the next step done, and of an undisturbed step.
fn replica(megabytes: u32, victim: usize) -> anyhow::Result<(f64, f64)> {
    let mut job = Job::start(2, megabytes, None)?;
    let mut session = job.join()?;
    job.steps(&mut session, 0, BEFORE)?;
    job.wait_for_copies(1 - victim)?;
    let undisturbed = job.steps(&mut session, BEFORE, 2 * BEFORE)?;
    job.servers[victim].kill()?;
    let disturbed = job.steps(&mut session, 2 * BEFORE, 2 * BEFORE + 1)?;
    job.steps(&mut session, 2 * BEFORE + 1, 2 * BEFORE + AFTER)?;
    job.check(&session, 2 * BEFORE + AFTER)?;
    session.leave(true, 0, Default::default())?;
    Ok((disturbed[0], median(&undisturbed)))
}

/// Seconds from the start of a server's successor to the next step done, and of reading as many bytes.
fn checkpoint(megabytes: u32) -> anyhow::Result<(f64, f64)> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let mut job = Job::start(1, megabytes, Some(folder.path()))?;
    let mut session = job.join()?;
    let mut step = 0;
    let started = Instant::now();
    let kept = loop {
        job.steps(&mut session, step, step + 1)?;
        step = session.next_step();
        if let Some(kept) = Catalog::new(folder.path()).complete()?.last() {
            break *kept;
        }
        ensure!(started.elapsed() < PATIENCE, "no checkpoint was written");
    };
    let part = Catalog::new(folder.path()).path(kept).join("ps-00000-of-00001.safetensors");
    let reading = Instant::now();
    let bytes = std::fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?.len();
    let limit = reading.elapsed().as_secs_f64();
    ensure!(bytes >= megabytes as usize * 1_000_000, "the checkpoint holds {bytes} bytes only");
    job.servers[0].kill()?;
    let start = Instant::now();
    job.servers[0] = job.server(0)?;
    let until = session.next_step() + 2;
    // Back at the checkpoint, then a step.
    let at = session.exchange(session.next_step())?;
    session.exchange(at)?;
    let seconds = start.elapsed().as_secs_f64();
    job.steps(&mut session, at + 1, until)?;
    job.check(&session, until)?;
    session.leave(true, 0, Default::default())?;
    Ok((seconds, limit))
}

struct Job {
    environment: Environment,
    elements: usize,
    servers: Vec<Server>,
    runtime: Runtime,
}

/// A server process; killed when it is dropped.
struct Server(Child);

impl Server {
    /// kill -9.
    fn kill(&mut self) -> anyhow::Result<()> {
        self.0.kill().context("cannot kill a server")?;
        self.0.wait().context("cannot wait for a server")?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.kill();
    }
}

impl Job {
    fn start(servers: u32, megabytes: u32, folder: Option<&Path>) -> anyhow::Result<Self> {
        // Held together, so that they differ.
        let ports: Vec<_> = (0..servers).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
        let addresses = ports.iter().map(|port| port.local_addr().map(|address| address.to_string()));
        let policy = CheckpointPolicy { interval_seconds: 1, keep: 1, ..CheckpointPolicy::default() };
        let environment = Environment {
            name: "bench-recovery".into(),
            namespace: "default".into(),
            uid: format!("bench-recovery-{:016x}", rand::random::<u64>()),
            role: Role::Server,
            index: 0,
            servers: addresses.collect::<Result<_, _>>()?,
            replication_factor: servers,
            trainers: 1,
            training: Training {
                consistency: Consistency { mode: ConsistencyMode::Sync, ..Consistency::default() },
                optimizer: Optimizer {
                    kind: OptimizerKind::Sgd,
                    learning_rate: 0.0625,
                    momentum: 0.0,
                    ..Optimizer::default()
                },
                ..Training::default()
            },
            incarnation: 0,
            local_rank: 0,
            result_file: None,
            checkpoint: folder.map(|folder| Checkpoint { folder: folder.display().to_string(), policy }),
            tls_folder: None,
        };
        drop(ports);
        let runtime = Runtime::new().context("cannot start a runtime")?;
        let elements = megabytes as usize * 250_000;
        let mut job = Self { environment, elements, servers: Vec::new(), runtime };
        job.servers = (0..servers).map(|index| job.server(index)).collect::<anyhow::Result<_>>()?;
        Ok(job)
    }

    fn server(&self, index: u32) -> anyhow::Result<Server> {
        let program: PathBuf = std::env::current_exe().context("cannot find this program")?;
        let place = Environment { index, ..self.environment.clone() };
        let mut command = Command::new(program);
        command.args(["bench", "server"]).envs(place.to_vars()).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Server(command.spawn().context("cannot start a server")?))
    }

    fn join(&self) -> anyhow::Result<Session> {
        let place = Environment { role: Role::Trainer, ..self.environment.clone() };
        let tensors = vec![TensorSpec { name: "weight".into(), shape: vec![self.elements as u64] }];
        let mut session = Session::join(SessionConfig::new(&place, tensors, 0), &vec![1.0; self.elements])?;
        session.gradients_mut().fill(GRADIENT);
        Ok(session)
    }

    /// Does the steps from `first` to before `until`; the seconds of each.
    fn steps(&self, session: &mut Session, first: u64, until: u64) -> anyhow::Result<Vec<f64>> {
        let step = |step| {
            let start = Instant::now();
            let next = session.exchange(step)?;
            ensure!(next == step + 1, "training went back to step {next} after step {step}");
            Ok(start.elapsed().as_secs_f64())
        };
        (first..until).map(step).collect()
    }

    /// Waits until all blocks are held twice, by what `server` says.
    fn wait_for_copies(&self, server: usize) -> anyhow::Result<()> {
        let address = format!("http://{}", self.environment.servers[server]);
        let start = Instant::now();
        self.runtime.block_on(async {
            let mut client = CoordinationClient::connect(address).await.context("cannot ask a server")?;
            while start.elapsed() < PATIENCE {
                let warnings = client.status(StatusRequest {}).await.context("no status")?.into_inner().warnings;
                if warnings.is_empty() {
                    return Ok(());
                }
                tokio::task::yield_now().await;
            }
            bail!("the blocks were not copied")
        })
    }

    /// That every parameter is what `steps` steps make of it, no more and no fewer.
    fn check(&self, session: &Session, steps: u64) -> anyhow::Result<()> {
        let want = (0..steps).fold(1.0_f32, |value, _| value - 0.0625 * GRADIENT);
        let wrong = session.parameters().iter().find(|value| **value != want);
        ensure!(wrong.is_none(), "after {steps} steps parameters are {wrong:?}, expected {want}");
        Ok(())
    }
}

/// One server of the job that the environment tells of.
pub fn serve() -> anyhow::Result<()> {
    let environment = Environment::from_vars(|name| std::env::var(name).ok())?.context("no job in the environment")?;
    let runtime = Runtime::new().context("cannot start a runtime")?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&environment.servers[environment.index as usize]).await?;
        server::run(listener, ServerConfig::new(&environment), std::future::pending()).await?;
        Ok(())
    })
}
