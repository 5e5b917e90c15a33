//! A job's servers, for real but in this process.

use std::net::TcpListener;
use std::thread::JoinHandle;

use psjobs_api::{Environment, ReplicaResult, Role, Training};
use psjobs_ps::server::{self, ServerConfig};
use psjobs_rpc::server_integration;
use psjobs_workloads::workload;

/// Running servers of one job.
pub struct Job {
    environment: Environment,
    servers: Vec<JoinHandle<ReplicaResult>>,
}

impl Job {
    /// Starts the servers on ports that are free.
    pub fn start(servers: u32, trainers: u32, training: Training) -> Self {
        let listeners: Vec<TcpListener> =
            (0..servers).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
        let address = |listener: &TcpListener| listener.local_addr().expect("bound").to_string();
        let environment = Environment::new("test", "test", listeners.iter().map(address).collect(), trainers, training);
        let servers = listeners
            .into_iter()
            .zip(0..)
            .map(|(listener, index)| {
                let config = ServerConfig::new(&Environment { index, ..environment.clone() });
                std::thread::spawn(move || serve(listener, config))
            })
            .collect();
        Self { environment, servers }
    }

    /// The environment of a trainer.
    pub fn trainer(&self, index: u32) -> Environment {
        Environment { role: Role::Trainer, index, ..self.environment.clone() }
    }

    /// Waits for the servers, which end when the trainers have left.
    pub fn join(self) -> Vec<ReplicaResult> {
        self.servers.into_iter().map(|server| server.join().expect("a server")).collect()
    }
}

fn serve(listener: TcpListener, mut config: ServerConfig) -> ReplicaResult {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        listener.set_nonblocking(true).expect("tokio wants it so");
        let listener = tokio::net::TcpListener::from_std(listener).expect("registered");
        let hosting = server_integration::host(&mut config, workload::offered(0));
        let result = server::run(listener, config, std::future::pending()).await.expect("every trainer left well");
        hosting.await.expect("what it hosted ends with it");
        result
    })
}
