//! Jobs whose servers die, stop and come back: what the trainers end up with is what they would have
//! got from servers that never did.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use psjobs_api::ReplicaResult;
use psjobs_api::training::{ConsistencyMode, OptimizerKind};
use psjobs_ps::checkpoint::{Catalog, Checkpoint};
use psjobs_ps::client::Session;
use psjobs_ps::server::{self, CheckpointConfig, ServerConfig, ServerError};
use safetensors::SafeTensors;
use support::*;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// A server with a runtime of its own, so that it can die with all its tasks and connections at once.
struct Process {
    runtime: Runtime,
    stop: CancellationToken,
    ended: tokio::task::JoinHandle<Result<ReplicaResult, ServerError>>,
}

impl Process {
    fn start(listener: std::net::TcpListener, config: ServerConfig) -> Self {
        // Told only if the test fails.
        drop(tracing_subscriber::fmt().with_test_writer().try_init());
        let runtime = Runtime::new().expect("a runtime");
        let stop = CancellationToken::new();
        listener.set_nonblocking(true).expect("a socket");
        let listener = runtime.block_on(async { TcpListener::from_std(listener) }).expect("a socket");
        let ended = runtime.spawn(server::run(listener, config, stop.clone().cancelled_owned()));
        Self { runtime, stop, ended }
    }

    fn kill(self) {
        self.runtime.shutdown_timeout(Duration::from_secs(5));
    }

    fn outcome(self) -> Result<ReplicaResult, ServerError> {
        self.runtime.block_on(self.ended).expect("no panic")
    }
}

/// The servers of one job with a checkpoint folder.
struct Job {
    addresses: Vec<SocketAddr>,
    folder: PathBuf,
    mode: ConsistencyMode,
    optimizer: OptimizerKind,
    trainers: u32,
    interval: Duration,
}

impl Job {
    fn new(folder: &Path, servers: usize, trainers: u32, mode: ConsistencyMode) -> Self {
        let bind = || std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        // Held together, so that they differ; a server that comes back must find its port free.
        let listeners: Vec<_> = (0..servers).map(|_| bind()).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
        let interval = Duration::from_millis(50);
        Self { addresses, folder: folder.to_owned(), mode, optimizer: OptimizerKind::Sgd, trainers, interval }
    }

    fn servers(&self) -> Vec<String> {
        self.addresses.iter().map(ToString::to_string).collect()
    }

    fn start(&self, index: u32) -> Process {
        let mut config = config(index, self.addresses.len() as u32, self.trainers, self.mode);
        if self.optimizer != OptimizerKind::Sgd {
            config.training.optimizer.momentum = 0.0;
        }
        config.training.optimizer.kind = self.optimizer;
        config.checkpoint = Some(CheckpointConfig {
            folder: self.folder.clone(),
            interval: self.interval,
            keep: 2,
            resume: true,
            servers: self.servers(),
        });
        Process::start(listen_again(self.addresses[index as usize]), config)
    }

    fn start_all(&self) -> Vec<Process> {
        (0..self.addresses.len() as u32).map(|index| self.start(index)).collect()
    }

    /// Trains to step `until` on a thread; every step done goes to `steps`.
    fn trainer(&self, index: u32, until: u64, steps: mpsc::Sender<u64>) -> JoinHandle<Vec<f32>> {
        let mut config = session_config(index, self.servers());
        config.total_steps = until;
        config.shared_memory = index.is_multiple_of(2);
        std::thread::spawn(move || {
            let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
            let mut step = session.next_step();
            while step < until {
                let values = gradient(index, step, elements());
                session.gradients_mut().copy_from_slice(&values);
                step = session.exchange(step).expect("the servers answer");
                // Nobody may be interested any more.
                let _ = steps.send(step);
            }
            let parameters = session.parameters().to_vec();
            session.leave(true, 0, BTreeMap::new()).expect("leaves");
            parameters
        })
    }
}

/// A port that a killed server has just left takes a moment to become free.
fn listen_again(address: SocketAddr) -> std::net::TcpListener {
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

fn wait_for(steps: &mpsc::Receiver<u64>, step: u64) {
    while steps.recv_timeout(Duration::from_secs(60)).expect("training goes on") < step {}
}

fn wait_for_checkpoint(folder: &Path, after: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let newest = Catalog::new(folder).complete().expect("a folder").last().copied();
        if let Some(step) = newest.filter(|step| *step > after) {
            return step;
        }
        assert!(Instant::now() < deadline, "no checkpoint after step {after}");
        std::thread::yield_now();
    }
}

/// What two trainers get that nobody disturbs.
fn undisturbed(steps: u64) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::new(folder.path(), 1, 2, ConsistencyMode::Sync);
    let servers = job.start_all();
    let (sender, _steps) = mpsc::channel();
    let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, steps, sender.clone())).collect();
    let parameters = trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).next_back();
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    parameters.expect("two trainers")
}

#[test]
fn a_killed_server_costs_no_bit() {
    const STEPS: u64 = 150;
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::new(folder.path(), 2, 2, ConsistencyMode::Sync);
    let mut servers = job.start_all();
    let (sender, steps) = mpsc::channel();
    let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, STEPS, sender.clone())).collect();
    let mut newest = 0;
    for victim in [1, 0] {
        wait_for(&steps, newest + 20);
        newest = wait_for_checkpoint(folder.path(), newest);
        servers.remove(victim).kill();
        servers.insert(victim, job.start(victim as u32));
    }
    drop(steps);
    let want = undisturbed(STEPS);
    for trainer in trainers {
        assert!(trainer.join().expect("no panic") == want, "parameters differ from those of an undisturbed job");
    }
    for server in servers {
        server.outcome().expect("ends well");
    }
    let model = fs::read(folder.path().join("model.safetensors")).expect("the model is exported");
    let model = SafeTensors::deserialize(&model).expect("safetensors");
    let weight = model.tensor("fc.weight").expect("the tensor").data().to_vec();
    assert_eq!(weight, bytemuck_f32(&want[7..]), "the exported model is the trained one");
    let kept = Catalog::new(folder.path()).complete().expect("a folder");
    assert!(kept.len() <= 2 && kept.contains(&STEPS), "{kept:?}");
}

fn bytemuck_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_stopped_job_goes_on_with_another_number_of_servers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut at = 0;
    let mut last = Vec::new();
    for (servers, until) in [(2, 7), (1, 15), (3, 20)] {
        let job = Job::new(folder.path(), servers, 2, ConsistencyMode::Sync);
        let running = job.start_all();
        let (sender, steps) = mpsc::channel();
        let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, until, sender.clone())).collect();
        assert_eq!(steps.recv_timeout(Duration::from_secs(60)).expect("trains"), at + 1, "it goes on where it was");
        at = until;
        last = trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).next_back().expect("two");
        running.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    }
    assert!(last == undisturbed(20), "parameters differ from those of an undisturbed job");
}

#[test]
fn a_server_that_is_told_to_stop_keeps_what_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::new(folder.path(), 2, 1, ConsistencyMode::Async);
    let servers = job.start_all();
    let mut session = Session::join(session_config(0, job.servers()), &vec![1.0; elements()]).expect("joins");
    for step in 0..5 {
        session.gradients_mut().fill(1.0);
        assert_eq!(session.exchange(step).expect("answers"), step + 1);
    }
    let parameters = session.parameters().to_vec();
    session.leave(false, 0, BTreeMap::new()).expect("leaves");
    servers.iter().for_each(|server| server.stop.cancel());
    for server in servers {
        assert!(matches!(server.outcome(), Err(ServerError::Stopped)));
    }
    let checkpoint = Checkpoint::open(&Catalog::new(folder.path()).path(5)).expect("the checkpoint of step 5");
    assert!(checkpoint.read(0..elements()).expect("whole").values == parameters);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_a_foreign_one_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::new(folder.path(), 1, 1, ConsistencyMode::Sync);
    // Only the first and the last step of each run are kept.
    job.interval = Duration::from_secs(3600);
    let (sender, steps) = mpsc::channel();
    for until in [3, 6] {
        let server = job.start(0);
        job.trainer(0, until, sender.clone()).join().expect("no panic");
        server.outcome().expect("ends well");
    }
    let newest = Catalog::new(folder.path()).path(6).join("ps-00000-of-00001.safetensors");
    let mut bytes = fs::read(&newest).expect("a part");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).expect("written");
    let server = job.start(0);
    while steps.try_recv().is_ok() {}
    job.trainer(0, 5, sender.clone()).join().expect("no panic");
    assert_eq!(steps.try_iter().collect::<Vec<_>>(), [4, 5], "it goes on from step 3");
    server.outcome().expect("ends well");

    job.optimizer = OptimizerKind::Adam;
    let error = job.start(0).outcome().expect_err("another optimizer").to_string();
    assert!(error.contains("SGD") && error.contains("Adam"), "{error}");
    assert!(Catalog::new(folder.path()).complete().expect("a folder").contains(&5), "nothing is lost");
}
