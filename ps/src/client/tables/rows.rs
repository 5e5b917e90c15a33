//! Keys to their servers, rows and gradients back and forth.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::try_join_all;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::{RowGradients, Shared};
use crate::client::ballots::Leader;
use crate::client::config::SessionConfig;
use crate::client::connecting::{self, INTERRUPTIBLE, TRY, schedule, stopped, unreachable};
use crate::client::error::{ClientError, is_retryable};
use crate::proto::sparse_tables_client::SparseTablesClient;
use crate::proto::{self, PullRowsRequest, PushRowsRequest};
use crate::retry::{Failure, LOG_INTERVAL, retry};
use crate::sparse::{MAX_MESSAGE, key};

/// No server counts as gone before, however short the wait for one is. Servers take a trainer for lost after as much time.
const LEAST_SILENCE: Duration = Duration::from_secs(30);
/// A process that has not looked for so long stood still: it heard no server, because it did not listen.
const STOOD_STILL: Duration = Duration::from_secs(5);

impl Shared {
    /// Returns a copy that ignores the interrupt, for the last messages of a trainer that was interrupted.
    pub fn uninterrupted(&self) -> Self {
        Self {
            config: SessionConfig { interrupt: Arc::default(), ..self.config.clone() },
            connect_timeout: self.connect_timeout,
            specs: self.specs.clone(),
            servers_train_layers: self.servers_train_layers,
            epoch: self.epoch,
            routes: self.routes.clone(),
            layers_wanted: AtomicU64::new(0),
        }
    }

    pub(super) async fn pull(&self, wanted: &[(usize, Vec<u64>)]) -> Result<Vec<Vec<f32>>, ClientError> {
        let servers = self.routes.len();
        // By server and table: the places of its keys.
        let mut places = vec![vec![Vec::new(); wanted.len()]; servers];
        for (of, (_, keys)) in wanted.iter().enumerate() {
            for (place, key) in keys.iter().enumerate() {
                places[key::server(*key, servers as u32) as usize][of].push(place);
            }
        }
        let asked = places.iter().enumerate().filter(|(_, places)| places.iter().any(|p| !p.is_empty()));
        let answers = asked.map(|(server, places)| async move {
            let keys = |(of, places): (usize, &Vec<usize>)| proto::TableKeys {
                table: wanted[of].0 as u32,
                keys: places.iter().map(|place| wanted[of].1[*place]).collect(),
            };
            let wanted = places.iter().enumerate().map(keys).collect();
            let (trainer, shard) = (Some(self.config.id()), Some(server as u32));
            let request = PullRowsRequest { trainer, wanted, epoch: self.epoch, shard };
            let reply = self
                .insist(server, |mut client| {
                    let request = request.clone();
                    async move { client.pull_rows(request).await }
                })
                .await?;
            self.answered(server, reply.leader_term);
            Ok::<_, ClientError>((server, places, reply.rows))
        });
        let mut rows: Vec<Vec<f32>> =
            wanted.iter().map(|(table, keys)| vec![0.0; keys.len() * self.specs[*table].width]).collect();
        for (server, places, answer) in try_join_all(answers).await? {
            for (of, places) in places.iter().enumerate() {
                let row = self.specs[wanted[of].0].width * size_of::<f32>();
                let answer = answer.get(of).filter(|rows| rows.len() == places.len() * row);
                let answer = answer.ok_or_else(|| self.refused(server, "it sent other rows than were asked for"))?;
                let into: &mut [u8] = bytemuck::cast_slice_mut(&mut rows[of]);
                for (place, values) in places.iter().zip(answer.chunks_exact(row)) {
                    into[place * row..][..row].copy_from_slice(values);
                }
            }
        }
        Ok(rows)
    }

    /// One for each server, even where it gets no gradient: in Sync it waits for this trainer's step.
    pub(super) fn requests(&self, step: u64, gradients: &[RowGradients]) -> Vec<PushRowsRequest> {
        let servers = self.routes.len();
        let request = |server| PushRowsRequest {
            trainer: Some(self.config.id()),
            step,
            tables: Vec::new(),
            epoch: self.epoch,
            shard: Some(server as u32),
        };
        let mut requests: Vec<PushRowsRequest> = (0..servers).map(request).collect();
        for RowGradients { table, keys, values } in gradients {
            let width = self.specs[*table].width;
            assert_eq!(values.len(), keys.len() * width, "a row of table {table} for each key");
            let mut parts = vec![(Vec::new(), Vec::new()); servers];
            for (key, row) in keys.iter().zip(values.chunks_exact(width)) {
                let (keys, bytes) = &mut parts[key::server(*key, servers as u32) as usize];
                keys.push(*key);
                bytes.extend_from_slice(bytemuck::cast_slice(row));
            }
            for (request, (keys, bytes)) in requests.iter_mut().zip(parts) {
                if !keys.is_empty() {
                    let table = *table as u32;
                    request.tables.push(proto::TableGradients { table, keys, gradients: bytes.into() });
                }
            }
        }
        requests
    }

    pub(super) async fn push(&self, requests: Vec<PushRowsRequest>) -> Result<(), ClientError> {
        let pushed = requests.into_iter().enumerate().map(|(server, request)| async move {
            let bytes: usize = request.tables.iter().map(|t| t.keys.len() * 8 + t.gradients.len()).sum();
            if bytes + 4096 > MAX_MESSAGE {
                let reason = format!("a push of {bytes} bytes is longer than a message may be, {MAX_MESSAGE}");
                return Err(self.refused(server, format!("{reason}; read fewer examples in a step")));
            }
            let reply = self
                .insist(server, |mut client| {
                    let request = request.clone();
                    async move { client.push_rows(request).await }
                })
                .await?;
            self.answered(server, reply.leader_term);
            self.routes[server].next_step.fetch_max(request.step.saturating_add(1), Ordering::Relaxed);
            Ok(reply)
        });
        let replies = try_join_all(pushed).await?;
        let wanted = replies.first().map_or(0, |of_server_0| of_server_0.layers_wanted_at);
        self.layers_wanted.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    /// Repeats a call until the server answers, for as long as a server may be away. The answer itself has no deadline,
    /// because it may have to wait for other trainers; a server that is gone is found by its connection, and any other one by
    /// the heartbeats: those trainers may have given up on it, and never come.
    pub async fn insist<T, F: Future<Output = Result<Response<T>, Status>>>(
        &self,
        server: usize,
        call: impl Fn(SparseTablesClient<Channel>) -> F,
    ) -> Result<T, ClientError> {
        let replicated = self.config.replication_factor > 1;
        let attempt = || {
            let (host, channel) = self.routes[server].leader();
            let answer = call(SparseTablesClient::new(channel).max_decoding_message_size(MAX_MESSAGE));
            let address = &self.config.servers[host as usize];
            async move {
                match answer.await {
                    Ok(reply) => Ok(reply.into_inner()),
                    Err(status) if replicated && is_retryable(&status) => {
                        self.find_leader(server as u32, host).await.map_err(Failure::Permanent)?;
                        Err(Failure::Transient(status.message().to_owned()))
                    }
                    Err(status) if status.code() == Code::Aborted => {
                        Err(Failure::Permanent(ClientError::TablesLost { address: address.clone() }))
                    }
                    Err(status) if !is_retryable(&status) => {
                        Err(Failure::Permanent(ClientError::refused(address, &status)))
                    }
                    Err(status) => Err(Failure::Transient(status.message().to_owned())),
                }
            }
        };
        let mut due = LOG_INTERVAL;
        let log = |reason: &String, elapsed: Duration| {
            tracing::debug!(server, reason, "asking again");
            if elapsed >= due {
                tracing::info!(reason, seconds = elapsed.as_secs(), "waiting for server {server}");
                due = elapsed + LOG_INTERVAL;
            }
        };
        let concluded = self.config.concluded.load(Ordering::Relaxed);
        let limit = if concluded { self.config.waiting_time_at_end(self.epoch) } else { self.config.connect_timeout };
        let schedule = schedule(&self.config, server as u32).failing_for(limit);
        tokio::select! {
            biased;
            answer = retry(schedule, pending(), attempt, log) => {
                answer.map_err(|why| stopped(&self.config, server as u32, limit, why))
            }
            error = self.no_answer(limit) => Err(error),
        }
    }

    /// Waits until an answer that may take any time cannot come any more: this trainer is asked to stop, or some server has
    /// left its heartbeats unanswered for `limit`. Where two servers hold each block, calls find the one that is left.
    pub async fn no_answer(&self, limit: Duration) -> ClientError {
        let replicated = self.config.replication_factor > 1;
        let silence = limit.max(LEAST_SILENCE);
        let (mut listens_since, mut looked) = (Instant::now(), Instant::now());
        loop {
            if self.config.interrupted() {
                return ClientError::Interrupted;
            }
            if looked.elapsed() >= STOOD_STILL {
                listens_since = Instant::now();
            }
            looked = Instant::now();
            if !replicated
                && listens_since.elapsed() >= silence
                && let Some(gone) = self.config.last_heard.silent(silence)
            {
                return unreachable(&self.config, gone, silence, "it answers no heartbeat");
            }
            tokio::time::sleep(INTERRUPTIBLE).await;
        }
    }

    /// Looks for the server that leads the rows of `shard`, now that `host` does not; leaves the way as it is if none does
    /// yet.
    ///
    /// # Errors
    /// [`ClientError::TablesLost`] if the leader is in a later epoch, or lacks steps that were acknowledged, because both
    /// holders were lost.
    async fn find_leader(&self, shard: u32, host: u32) -> Result<(), ClientError> {
        let mut holders = self.config.holders(shard);
        // The one that has just failed comes last.
        holders.sort_by_key(|holder| *holder == host);
        for holder in holders {
            let request = super::request(&self.config, &self.specs, self.servers_train_layers, shard);
            let opening = super::open(&self.config, request, holder, self.epoch);
            let address = &self.config.servers[holder as usize];
            let (leader, reply) = match tokio::time::timeout(TRY, opening).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(connecting::Failure::Final(error))) => return Err(error),
                Ok(Err(connecting::Failure::Status(status))) if !is_retryable(&status) => {
                    return Err(ClientError::refused(address, &status));
                }
                Ok(Err(connecting::Failure::Status(_))) | Err(_) => continue,
            };
            let route = &self.routes[shard as usize];
            // The servers have gone to a checkpoint since, or both holders were lost.
            if reply.epoch != self.epoch || reply.next_step < route.next_step.load(Ordering::Relaxed) {
                return Err(ClientError::TablesLost { address: address.clone() });
            }
            route.lead_to(leader);
            return Ok(());
        }
        Ok(())
    }

    /// Records that the leader of `shard` in `term` has answered.
    pub fn answered(&self, shard: usize, term: u64) {
        self.config.voting.answered(shard as u32, Leader { term, epoch: self.epoch });
    }

    pub fn refused(&self, server: usize, reason: impl Into<String>) -> ClientError {
        ClientError::Refused { address: self.config.servers[server].clone(), reason: reason.into() }
    }
}
