//! Servers and trainers of one small job, over real sockets.

pub mod job;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::ReplicaResult;
use psjobs_api::training::{
    Compression, Consistency, ConsistencyMode, Optimizer, Staleness, StalenessMomentum, StalenessPolicy, Training,
};
use psjobs_ps::client::{LastHeard, Session, SessionConfig, TensorSpec, Voting};
use psjobs_ps::network::Network;
use psjobs_ps::server::{self, ServerConfig, ServerError, Timeouts};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

pub const UID: &str = "job-1";

/// Time between two looks at what is waited for: those who make it true need the cores.
pub const POLL: Duration = Duration::from_millis(10);

pub fn training(mode: ConsistencyMode) -> Training {
    Training {
        consistency: Consistency { mode, ..Consistency::default() },
        optimizer: Optimizer { learning_rate: 0.125, momentum: 0.5, ..Optimizer::default() },
        // Updates are compared with those of one process, which has one momentum.
        staleness: Staleness {
            policy: Some(StalenessPolicy::None),
            momentum: (mode != ConsistencyMode::Sync).then_some(StalenessMomentum::Shared),
            ..Staleness::default()
        },
        ..Training::default()
    }
}

pub fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::new("fc.bias", vec![7]),
        // More than two full blocks, so that several blocks and both servers take part.
        TensorSpec::new("fc.weight", vec![600_000]),
    ]
}

pub fn elements() -> usize {
    tensors().iter().map(|t| t.elements().expect("small")).sum()
}

/// A gradient that differs in every element, trainer and step, with values whose sum depends on the order.
pub fn gradient(trainer: u32, step: u64, elements: usize) -> Vec<f32> {
    // Multiplicative hashing: a sine would be most of the time that these tests take.
    let hash = |i: usize| (i as u32).wrapping_add(step as u32).wrapping_mul(2_654_435_761) as i32;
    let value = |i| hash(i) as f32 / 2_f32.powi(31);
    (0..elements).map(|i| (value(i) + 1e-7 * trainer as f32) * (1.0 + 1e3 * (i % 3) as f32)).collect()
}

pub struct Server {
    pub address: SocketAddr,
    pub stop: CancellationToken,
    pub ended: JoinHandle<Result<ReplicaResult, ServerError>>,
}

pub fn config(index: u32, servers: u32, trainers: u32, mode: ConsistencyMode) -> ServerConfig {
    ServerConfig {
        job_uid: UID.into(),
        index,
        incarnation: 0,
        servers,
        trainers,
        min_trainers: None,
        finished_trainers: Vec::new(),
        training: training(mode),
        timeouts: Timeouts::default(),
        supervised: false,
        address: None,
        shared_memory: true,
        replicas: Vec::new(),
        checkpoint: None,
        series: None,
        metrics: None,
        evaluation: None,
        refuses_parameters: None,
        network: Network::default(),
        services: Routes::default(),
        ending: CancellationToken::new(),
    }
}

pub async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a free port")
}

pub async fn start(config: ServerConfig) -> Server {
    start_on(listen().await, config)
}

pub fn start_on(listener: TcpListener, config: ServerConfig) -> Server {
    let address = listener.local_addr().expect("bound");
    let stop = CancellationToken::new();
    let ended = tokio::spawn(server::run(listener, config, stop.clone().cancelled_owned()));
    Server { address, stop, ended }
}

pub async fn start_all(servers: u32, trainers: u32, mode: ConsistencyMode) -> Vec<Server> {
    let mut all = Vec::new();
    for index in 0..servers {
        all.push(start(config(index, servers, trainers, mode)).await);
    }
    all
}

/// Reads `/metrics`.
pub async fn metrics(address: SocketAddr) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("connects");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("answered");
    text
}

pub fn addresses(servers: &[Server]) -> Vec<String> {
    servers.iter().map(|server| server.address.to_string()).collect()
}

pub fn session_config(trainer: u32, servers: Vec<String>) -> SessionConfig {
    SessionConfig {
        job_uid: UID.into(),
        trainer,
        incarnation: 0,
        servers,
        tensors: tensors(),
        total_steps: 10,
        local_steps: 0,
        overlap: false,
        elastic: false,
        supervised: false,
        connect_timeout: Duration::from_secs(20),
        connections: 1,
        shared_memory: true,
        replication_factor: 1,
        compression: Compression::default(),
        network: Network::default(),
        interrupt: Arc::default(),
        voting: Voting::default(),
        last_heard: LastHeard::default(),
        concluded: Arc::default(),
        finished_trainers: Arc::default(),
    }
}

/// Trains `steps` steps from the session's next one; its final parameters.
pub fn train(mut session: Session, trainer: u32, until: u64) -> (Session, Vec<f32>) {
    let mut step = session.next_step();
    while step < until {
        let values = gradient(trainer, step, elements());
        session.gradients_mut().copy_from_slice(&values);
        step = session.exchange(step).expect("the servers answer");
    }
    let parameters = session.parameters().to_vec();
    (session, parameters)
}
