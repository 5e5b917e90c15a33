//! Jobs whose servers can be killed and started again.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use psjobs_api::ReplicaResult;
use psjobs_api::training::{ConsistencyMode, OptimizerKind};
use psjobs_ps::checkpoint::Runs;
use psjobs_ps::client::Session;
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::server::{self, CheckpointConfig, ServerConfig, ServerError};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::*;

/// A server with a runtime of its own, so that it can die with all its tasks and connections at once.
pub struct Process {
    runtime: Runtime,
    pub stop: CancellationToken,
    ended: tokio::task::JoinHandle<Result<ReplicaResult, ServerError>>,
}

impl Process {
    pub fn start(listener: std::net::TcpListener, config: ServerConfig) -> Self {
        // Shown only if the test fails.
        drop(tracing_subscriber::fmt().with_test_writer().try_init());
        let runtime = Runtime::new().expect("a runtime");
        let stop = CancellationToken::new();
        listener.set_nonblocking(true).expect("a socket");
        let listener = runtime.block_on(async { TcpListener::from_std(listener) }).expect("a socket");
        let ended = runtime.spawn(server::run(listener, config, stop.clone().cancelled_owned()));
        Self { runtime, stop, ended }
    }

    pub fn kill(self) {
        self.runtime.shutdown_timeout(Duration::from_secs(5));
    }

    pub fn outcome(self) -> Result<ReplicaResult, ServerError> {
        self.runtime.block_on(self.ended).expect("no panic")
    }
}

/// The servers of one job with a checkpoint folder.
pub struct Job {
    pub addresses: Vec<SocketAddr>,
    /// Where its state is kept.
    pub folder: Option<PathBuf>,
    /// How often.
    pub interval: Duration,
    /// Every block is held by two servers.
    pub replicated: bool,
    pub mode: ConsistencyMode,
    pub optimizer: OptimizerKind,
    pub momentum: f64,
    pub trainers: u32,
    /// Unique id, which is its name too.
    pub uid: String,
    /// Begins from the newest checkpoint in the folder.
    pub resume: bool,
    /// Checkpoints to keep.
    pub keep: usize,
    /// Trainers that have finished before a server starts.
    pub finished_trainers: Vec<u32>,
    pub limit: Limit,
}

/// The steps that trainers make for now, so that a job is still under way however slow the test is.
#[derive(Clone)]
pub struct Limit(Arc<(Mutex<u64>, Condvar)>);

impl Limit {
    fn none() -> Self {
        Self(Arc::new((Mutex::new(u64::MAX), Condvar::new())))
    }

    pub fn set(&self, steps: u64) {
        let (limit, changed) = &*self.0;
        *limit.lock().expect("no panic") = steps;
        changed.notify_all();
    }

    /// Lowers it, unless it is lower already.
    pub fn lower(&self, steps: u64) {
        let mut limit = self.0.0.lock().expect("no panic");
        *limit = steps.min(*limit);
    }

    pub fn remove(&self) {
        self.set(u64::MAX);
    }

    /// Waits until `step`, from 0, may be made.
    pub fn wait(&self, step: u64) {
        let (limit, changed) = &*self.0;
        drop(changed.wait_while(limit.lock().expect("no panic"), |limit| step >= *limit).expect("no panic"));
    }
}

impl Job {
    pub fn checkpointed(folder: &Path, servers: usize, trainers: u32, mode: ConsistencyMode) -> Self {
        Self { folder: Some(folder.to_owned()), ..Self::plain(servers, trainers, mode) }
    }

    pub fn replicated(servers: usize, trainers: u32, mode: ConsistencyMode) -> Self {
        Self { replicated: true, ..Self::plain(servers, trainers, mode) }
    }

    /// A job without checkpoints and replicas.
    pub fn plain(servers: usize, trainers: u32, mode: ConsistencyMode) -> Self {
        let bind = || std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        // Held together, so that they differ; a server that comes back must find its port free.
        let listeners: Vec<_> = (0..servers).map(|_| bind()).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
        let (interval, optimizer) = (Duration::from_millis(50), OptimizerKind::Sgd);
        Self {
            addresses,
            folder: None,
            interval,
            replicated: false,
            mode,
            optimizer,
            momentum: 0.5,
            trainers,
            uid: UID.into(),
            resume: true,
            keep: 2,
            finished_trainers: Vec::new(),
            limit: Limit::none(),
        }
    }

    pub fn servers(&self) -> Vec<String> {
        self.addresses.iter().map(ToString::to_string).collect()
    }

    pub fn start(&self, index: u32) -> Process {
        self.start_again(index, 0)
    }

    /// Starts a server that was started so many times before.
    pub fn start_again(&self, index: u32, incarnation: u32) -> Process {
        let mut config = config(index, self.addresses.len() as u32, self.trainers, self.mode);
        config.job_uid.clone_from(&self.uid);
        config.finished_trainers.clone_from(&self.finished_trainers);
        config.training.optimizer.momentum = self.momentum;
        config.training.optimizer.kind = self.optimizer;
        config.checkpoint = self.folder.clone().map(|folder| CheckpointConfig {
            job: self.uid.clone(),
            incarnation,
            folder: folder.into(),
            interval: self.interval,
            keep: self.keep,
            resume: self.resume,
            servers: self.servers(),
        });
        if self.replicated {
            config.replicas = self.servers();
        }
        Process::start(listen_again(self.addresses[index as usize]), config)
    }

    pub fn start_all(&self) -> Vec<Process> {
        (0..self.addresses.len() as u32).map(|index| self.start(index)).collect()
    }

    /// Returns the configuration of a trainer that trains to step `until`.
    pub fn session(&self, index: u32, until: u64) -> SessionConfig {
        SessionConfig { job_uid: self.uid.clone(), total_steps: until, ..session_config(index, self.servers()) }
    }

    /// Trains to step `until` on a thread; every step done goes to `steps`.
    pub fn trainer(&self, index: u32, until: u64, steps: mpsc::Sender<u64>) -> JoinHandle<Vec<f32>> {
        self.trainer_of(index, until, steps, move |step| gradient(index, step, elements()))
    }

    /// As [`Job::trainer`], with gradients by step.
    pub fn trainer_of(
        &self,
        index: u32,
        until: u64,
        steps: mpsc::Sender<u64>,
        gradient: impl Fn(u64) -> Vec<f32> + Send + 'static,
    ) -> JoinHandle<Vec<f32>> {
        let mut config = self.session(index, until);
        config.replication_factor = 1 + u32::from(self.replicated);
        config.shared_memory = index.is_multiple_of(2);
        let limit = self.limit.clone();
        std::thread::spawn(move || {
            let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
            let mut step = session.next_step();
            while step < until {
                limit.wait(step);
                session.gradients_mut().copy_from_slice(&gradient(step));
                step = session.exchange(step).expect("the servers answer");
                if step == 0 {
                    continue; // The servers went back to the beginning.
                }
                session.recorder().record(step, &[("loss".to_owned(), 1.0 / step as f64)].into());
                // The receiver may no longer exist.
                let _ = steps.send(step);
            }
            let parameters = session.parameters().to_vec();
            session.leave(true, 0, BTreeMap::new()).expect("leaves");
            parameters
        })
    }
}

/// A job under way.
pub struct Running<'a> {
    job: &'a Job,
    pub servers: Vec<Process>,
    /// Steps done, of all trainers.
    pub steps: mpsc::Receiver<u64>,
    trainers: Vec<JoinHandle<Vec<f32>>>,
    /// How often servers were started again.
    starts: u32,
}

impl Job {
    /// Starts everybody; the trainers train to step `until`, and make its last step in [`Running::finish`].
    pub fn run(&self, until: u64) -> Running<'_> {
        self.run_of(until, |index| move |step| gradient(index, step, elements()))
    }

    /// As [`Job::run`], with gradients by trainer and step.
    pub fn run_of<G: Fn(u64) -> Vec<f32> + Send + 'static>(
        &self,
        until: u64,
        gradient: impl Fn(u32) -> G,
    ) -> Running<'_> {
        self.limit.lower(until - 1);
        let (servers, (sender, steps)) = (self.start_all(), mpsc::channel());
        let trainer = |index| self.trainer_of(index, until, sender.clone(), gradient(index));
        Running { job: self, servers, steps, trainers: (0..self.trainers).map(trainer).collect(), starts: 0 }
    }

    /// Returns the result of the last of `trainers` undisturbed trainers, from one server.
    pub fn undisturbed(trainers: u32, until: u64) -> Vec<f32> {
        Self::plain(1, trainers, ConsistencyMode::Sync).run(until).finish().pop().expect("a trainer")
    }
}

impl Running<'_> {
    pub fn kill(&mut self, server: usize) {
        self.servers.remove(server).kill();
    }

    pub fn restart(&mut self, server: usize) {
        self.kill(server);
        self.starts += 1;
        self.servers.insert(server, self.job.start_again(server as u32, self.starts));
    }

    /// Steps that trainers are ahead of the test.
    pub const AHEAD: u64 = 30;

    /// Kills servers 1 and 0 of a job of two and starts them again, each when some steps and a new checkpoint were done. The
    /// job has the limit [`Running::AHEAD`] and 300 steps at least.
    pub fn restart_each_after_a_checkpoint(&mut self, folder: &Path) {
        let (mut newest, mut limit) = (0, Self::AHEAD);
        for victim in [1, 0] {
            wait_for(&self.steps, newest + 20);
            let deadline = Instant::now() + Duration::from_secs(60);
            newest = loop {
                match newest_checkpoint(folder) {
                    Some(step) if step > newest => break step,
                    _ => assert!(Instant::now() < deadline, "no checkpoint after step {newest}"),
                }
                // The next checkpoint may be of a later step. This thread sets the pace: if it stands still, so do they.
                limit += 1;
                self.job.limit.set(limit);
                std::thread::sleep(Duration::from_millis(20));
            };
            // They train while the server is killed.
            self.job.limit.set(limit + Self::AHEAD);
            wait_for(&self.steps, limit + 1);
            limit += Self::AHEAD;
            self.restart(victim);
        }
    }

    /// Returns the result of each trainer, after the servers have ended well.
    pub fn finish(self) -> Vec<Vec<f32>> {
        self.job.limit.remove();
        let parameters = self.trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).collect();
        self.servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
        parameters
    }
}

/// A port that a killed server has just left takes a moment to become free.
pub fn listen_again(address: SocketAddr) -> std::net::TcpListener {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option");
        match socket.bind(&address.into()).and_then(|()| socket.listen(64)) {
            Ok(()) => return socket.into(),
            Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
        }
        std::thread::yield_now();
    }
}

pub fn wait_for(steps: &mpsc::Receiver<u64>, step: u64) {
    while steps.recv_timeout(Duration::from_secs(60)).expect("training goes on") < step {}
}

/// Returns the step of the newest checkpoint.
fn newest_checkpoint(folder: &Path) -> Option<u64> {
    let run = Runs::new(folder).newest().expect("a folder")?;
    run.complete().expect("a folder").last().copied()
}

/// Waits for a checkpoint of a step after `after`.
pub fn wait_for_checkpoint(folder: &Path, after: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(step) = newest_checkpoint(folder).filter(|step| *step > after) {
            return step;
        }
        assert!(Instant::now() < deadline, "no checkpoint after step {after}");
        std::thread::sleep(POLL);
    }
}

/// Returns whether a server says that it holds something that no other server does.
pub fn held_once(servers: &[String]) -> bool {
    let runtime = Runtime::new().expect("a runtime");
    servers.iter().any(|server| {
        let warnings = runtime.block_on(warnings(&format!("http://{server}")));
        !warnings.is_ok_and(|warnings| !warnings.iter().any(|warning| warning.contains("held once")))
    })
}

async fn warnings(address: &str) -> Result<Vec<String>, tonic::Status> {
    match CoordinationClient::connect(address.to_owned()).await {
        Ok(mut client) => client.status(StatusRequest {}).await.map(|reply| reply.into_inner().warnings),
        Err(error) => Err(tonic::Status::from_error(error.into())),
    }
}

/// Returns whether a warning of a server holds `words`, if it answers.
pub fn warns(server: &str, words: &str) -> Option<bool> {
    let runtime = Runtime::new().expect("a runtime");
    let warnings = runtime.block_on(warnings(&format!("http://{server}"))).ok()?;
    Some(warnings.iter().any(|warning| warning.contains(words)))
}

/// Waits until a warning of a server holds `words`.
pub fn wait_for_warning(server: &str, words: &str) {
    let (address, runtime) = (format!("http://{server}"), Runtime::new().expect("a runtime"));
    wait_until(words, || {
        let warnings = runtime.block_on(warnings(&address));
        warnings.is_ok_and(|warnings| warnings.iter().any(|warning| warning.contains(words)))
    });
}

/// Waits until `condition` holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "it takes too long: {what}");
        std::thread::sleep(POLL);
    }
}

/// Waits until a server says that all that it holds is held twice.
pub fn wait_for_two_copies(server: &str) {
    let address = format!("http://{server}");
    let runtime = Runtime::new().expect("a runtime");
    let deadline = Instant::now() + Duration::from_secs(60);
    runtime.block_on(async {
        loop {
            let warnings = warnings(&address).await;
            match warnings {
                Ok(warnings) if !warnings.iter().any(|warning| warning.contains("held once")) => return,
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
            tokio::time::sleep(POLL).await;
        }
    });
}

/// Waits until everything is held twice.
pub fn wait_for_all_copies(servers: &[String]) {
    servers.iter().for_each(|server| wait_for_two_copies(server));
}
