//! A trainer that exchanges no gradient blocks, because its parameters live elsewhere: it takes part
//! in the job's life and tells its progress.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use super::link::{enter, persist};
use super::session::{HEARTBEAT, LEAVE};
use super::{ClientError, SessionConfig};
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;

/// A trainer's place in a job whose servers keep no blocks for it.
pub struct Member {
    config: SessionConfig,
    servers: Vec<CoordinationClient<Channel>>,
    report: Arc<Mutex<Report>>,
    heartbeats: Vec<JoinHandle<()>>,
    runtime: Runtime,
}

#[derive(Clone, Debug, Default)]
struct Report {
    step: u64,
    examples: u64,
    metrics: BTreeMap<String, f64>,
}

impl Member {
    /// Joins every server. Waits for servers that do not answer yet, up to `config.connect_timeout`.
    /// `config` names no tensors.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("psjobs-member")
            .enable_all()
            .build()
            .map_err(ClientError::Runtime)?;
        let mut member = Self { config, servers: Vec::new(), report: Arc::default(), heartbeats: Vec::new(), runtime };
        for server in 0..member.config.servers.len() as u32 {
            let config = &member.config;
            let (channel, _) = member.runtime.block_on(persist(config, server, || enter(config, server)))?;
            member.servers.push(CoordinationClient::new(channel));
            let heartbeat = member.beat(server as usize);
            member.heartbeats.push(heartbeat);
        }
        Ok(member)
    }

    /// What the next heartbeats say: steps done and examples read so far, and metrics.
    pub fn report(&self, step: u64, examples: u64, metrics: &BTreeMap<String, f64>) {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        *report = Report { step, examples, metrics: metrics.clone() };
    }

    /// Leaves every server, saying what [`Member::report`] said last: `finished` says that the work is
    /// done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have been told all the same.
    pub fn leave(mut self, finished: bool) -> Result<(), ClientError> {
        self.heartbeats.drain(..).for_each(|heartbeat| heartbeat.abort());
        let Report { step, examples, metrics } = self.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let trainer = Some(self.config.id());
        let beat = proto::HeartbeatRequest { trainer: trainer.clone(), examples, metrics: metrics.clone(), step };
        let request = proto::LeaveRequest { trainer, finished, examples, metrics };
        let mut outcome = Ok(());
        // Server 0 last: it speaks for the job, and should not be done before the others.
        for (server, mut client) in self.servers.drain(..).enumerate().rev() {
            let (beat, request) = (beat.clone(), request.clone());
            let tell = async {
                client.heartbeat(beat).await?;
                client.leave(request).await
            };
            let told = self.runtime.block_on(async { tokio::time::timeout(LEAVE, tell).await });
            let reason = match told {
                Ok(Ok(_)) => continue,
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => "no answer".to_owned(),
            };
            let (address, seconds) = (self.config.servers[server].clone(), LEAVE.as_secs());
            outcome = Err(ClientError::Unreachable { address, seconds, reason });
        }
        outcome
    }

    fn beat(&self, server: usize) -> JoinHandle<()> {
        let (mut client, report, trainer) = (self.servers[server].clone(), self.report.clone(), self.config.id());
        self.runtime.spawn(async move {
            let mut ticks = tokio::time::interval(HEARTBEAT);
            loop {
                ticks.tick().await;
                let Report { step, examples, metrics } = report.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let trainer = Some(trainer.clone());
                // One that is lost is followed by others; whether the server lives shows elsewhere.
                drop(client.heartbeat(proto::HeartbeatRequest { trainer, examples, metrics, step }).await);
            }
        })
    }
}
