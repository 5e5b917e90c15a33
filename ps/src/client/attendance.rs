//! A trainer's presence at its servers: heartbeats while it trains, and the last words.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tonic::Code;
use tonic::transport::Channel;

use super::link::join;
use super::{ClientError, SessionConfig};
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;

/// How often a trainer says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a server may take to note that a trainer leaves.
const LEAVE: Duration = Duration::from_secs(10);

/// What a trainer tells about itself.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Steps done, by a trainer that exchanges no gradients; of others the servers count them.
    pub step: u64,
    /// Examples read by this process.
    pub examples: u64,
    /// Latest values.
    pub metrics: BTreeMap<String, f64>,
    /// Time that this process has waited for servers and other trainers.
    pub waiting: Duration,
}

/// Heartbeats to every server, until it is dropped.
#[derive(Default)]
pub struct Attendance {
    servers: BTreeMap<u32, (CoordinationClient<Channel>, Channel, AbortOnDropHandle<()>)>,
    report: Arc<Mutex<Report>>,
}

impl Attendance {
    /// Sends heartbeats to `server` over `channel` from now on, and over none it had before.
    pub fn attend(&mut self, config: &SessionConfig, server: u32, channel: Channel) {
        let client = CoordinationClient::new(channel.clone());
        let (mut beating, report, config, dialled) =
            (client.clone(), self.report.clone(), config.clone(), channel.clone());
        let heartbeats = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(HEARTBEAT);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Report { step, examples, metrics, waiting } = read(&report);
                let (trainer, waiting_seconds) = (Some(config.id()), waiting.as_secs_f64());
                let request = proto::HeartbeatRequest { trainer, examples, metrics, step, waiting_seconds };
                // One that is lost is followed by others; whether the server lives shows elsewhere.
                let Err(status) = beating.heartbeat(request).await else { continue };
                tracing::debug!(reason = status.message(), "heartbeat failed");
                // Its blocks have another leader, so nobody else tells it that this trainer takes part.
                if config.replication_factor > 1 && status.code() == Code::Aborted {
                    drop(join(&config, None, dialled.clone()).await);
                }
            }
        });
        self.servers.insert(server, (client, channel, AbortOnDropHandle::new(heartbeats)));
    }

    /// What the next heartbeats say.
    pub fn report(&self, report: Report) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    /// Leaves every server with what was reported last: `finished` says that the work is done, false
    /// that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have been told all the same.
    pub async fn leave(self, config: &SessionConfig, finished: bool) -> Result<(), ClientError> {
        self.servers.values().for_each(|(.., heartbeats)| heartbeats.abort());
        let Report { step, examples, metrics, waiting: _ } = read(&self.report);
        let request = proto::LeaveRequest { trainer: Some(config.id()), finished, examples, metrics, step };
        let mut outcome = Ok(());
        // Server 0 last: it speaks for the job, and should not be done before the others.
        for (server, (mut client, channel, _)) in self.servers.into_iter().rev() {
            let request = request.clone();
            let leave = async {
                match client.leave(request.clone()).await {
                    // It was started anew and has not been told of this trainer yet.
                    Err(status) if config.replication_factor > 1 && status.code() == Code::Aborted => {
                        join(config, None, channel).await?;
                        client.leave(request).await
                    }
                    answered => answered,
                }
            };
            let told = tokio::time::timeout(LEAVE, leave).await;
            let reason = match told {
                Ok(Ok(_)) => continue,
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => "no answer".to_owned(),
            };
            let (address, seconds) = (config.servers[server as usize].clone(), LEAVE.as_secs());
            if config.replication_factor > 1 {
                // The servers that are left tell it when it comes back.
                tracing::warn!(%address, reason, "server {server} does not hear that this trainer leaves");
            } else {
                outcome = Err(ClientError::Unreachable { address, seconds, reason });
            }
        }
        outcome
    }
}

fn read(report: &Mutex<Report>) -> Report {
    report.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
