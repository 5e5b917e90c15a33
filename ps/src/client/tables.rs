//! A trainer's way to the job's sparse tables: deals keys out to the servers that have their rows, and
//! puts the answers together. [`AsyncTables`] runs on the caller's runtime, [`Tables`] brings its own.

mod blocking;
mod rows;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub use self::blocking::{Pulling, Pushing, Tables};
use super::ballots::Leader;
use super::config::SessionConfig;
use super::connecting::{Failure, connect, in_place, in_time, join, persist_any};
use super::error::ClientError;
use super::first_step::FirstStep;
use crate::proto::sparse_tables_client::SparseTablesClient;
use crate::proto::{self, OpenTablesRequest};
use crate::sparse::TableSpec;

/// Gradients of some rows of a table.
#[derive(Clone, Copy, Debug)]
pub struct RowGradients<'a> {
    /// Place of the table among the specs.
    pub table: usize,
    /// Any keys; gradients of one that comes twice are added.
    pub keys: &'a [u64],
    /// A row for each key.
    pub values: &'a [f32],
}

/// The job's sparse tables, as one trainer sees them, on the runtime of its caller. The trainer takes part in the
/// job as a [`Member`](super::Member) of the same configuration.
pub struct AsyncTables {
    pub(super) shared: Arc<Shared>,
    next_step: u64,
}

/// All tables, as they were opened.
pub(super) struct Shared {
    pub config: SessionConfig,
    /// How long servers are waited for while this trainer has steps to do.
    connect_timeout: Duration,
    specs: Vec<TableSpec>,
    /// The servers train the dense parameters, not the trainers.
    servers_train_layers: bool,
    /// Counts the times that the servers went to a checkpoint; 0 where they keep none.
    pub epoch: u64,
    /// By shard.
    routes: Arc<[Route]>,
    /// As `PushRowsReply.layers_wanted_at` said last.
    pub layers_wanted: AtomicU64,
}

/// The way to the rows of one server, a shard.
pub(super) struct Route {
    /// The server that leads the shard, as far as is known, and the connection to it.
    leader: Mutex<(u32, Channel)>,
    /// The first step that the shard has not acknowledged.
    next_step: AtomicU64,
}

impl Shared {
    /// Steps that all servers have acknowledged since the tables were opened, 0 if there are none.
    pub fn given_steps(&self) -> u64 {
        self.routes.iter().map(|route| route.next_step.load(Ordering::Relaxed)).min().unwrap_or(0)
    }
}

impl Route {
    fn new(leader: (u32, Channel)) -> Self {
        Self { leader: Mutex::new(leader), next_step: AtomicU64::new(0) }
    }

    pub fn leader(&self) -> (u32, Channel) {
        self.leader.lock().clone()
    }

    fn lead_to(&self, leader: (u32, Channel)) {
        *self.leader.lock() = leader;
    }
}

impl AsyncTables {
    /// Sends every server the job's tables, which must be the same for all trainers. Dense layers are trained by the
    /// trainers themselves ([`Layers`](super::Layers)).
    ///
    /// # Errors
    /// If a server stays away, or refuses the tables.
    pub async fn open(config: SessionConfig, specs: Vec<TableSpec>) -> Result<Self, ClientError> {
        let (shared, next_step) = open_all(config, specs, false).await?;
        Ok(Self { shared: Arc::new(shared), next_step })
    }

    /// As [`AsyncTables::open`], where the servers train the dense parameters, too.
    pub(super) async fn open_beside_parameters(
        config: SessionConfig,
        specs: Vec<TableSpec>,
    ) -> Result<Self, ClientError> {
        let (shared, next_step) = open_all(config, specs, true).await?;
        Ok(Self { shared: Arc::new(shared), next_step })
    }

    /// Opens the tables again, when the servers have gone to a checkpoint: what is on its way is lost, and the next
    /// step may be an earlier one.
    ///
    /// # Errors
    /// As [`AsyncTables::open`].
    pub async fn reopen(&mut self) -> Result<(), ClientError> {
        let Shared { config, connect_timeout, specs, servers_train_layers, epoch, .. } = &*self.shared;
        let has_concluded = config.concluded.load(Ordering::Relaxed);
        let connect_timeout = if has_concluded { config.waiting_time_at_end(*epoch) } else { *connect_timeout };
        let config = SessionConfig { connect_timeout, ..config.clone() };
        let (shared, next_step) = open_all(config, specs.clone(), *servers_train_layers).await?;
        (self.shared, self.next_step) = (Arc::new(shared), next_step);
        Ok(())
    }

    /// Counts the times that the servers went to a checkpoint; 0 where they keep none.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// The first step that not all servers have from this trainer.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// The tables.
    #[must_use]
    pub fn specs(&self) -> &[TableSpec] {
        &self.shared.specs
    }

    /// The rows of keys, of each table one behind the other in the order of its keys. A key without a row
    /// comes with its initial values.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    pub async fn pull(&self, wanted: &[(usize, &[u64])]) -> Result<Vec<Vec<f32>>, ClientError> {
        self.shared.pull(&owned(wanted)).await
    }

    /// Sends all gradients of a step, at most one set for each table, and waits until the consistency rule lets this
    /// trainer go on. Sent again, they are not applied again.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    ///
    /// # Panics
    /// If a set has not as many rows as keys.
    pub async fn push(&self, step: u64, gradients: &[RowGradients<'_>]) -> Result<(), ClientError> {
        self.shared.push(self.shared.requests(step, gradients)).await
    }
}

/// Copies a request, for a task that outlives it.
fn owned(wanted: &[(usize, &[u64])]) -> Vec<(usize, Vec<u64>)> {
    wanted.iter().map(|(table, keys)| (*table, keys.to_vec())).collect()
}

/// Opens them at every server, all in one epoch.
async fn open_all(
    mut config: SessionConfig,
    specs: Vec<TableSpec>,
    servers_train_layers: bool,
) -> Result<(Shared, u64), ClientError> {
    let connect_timeout = config.connect_timeout;
    let (mut epoch, mut leaders, mut steps) = (0, Vec::new(), Vec::new());
    while leaders.len() < config.servers.len() {
        let server = leaders.len() as u32;
        let (leader, reply) = persist_any(
            &config,
            server,
            |_| false,
            |host| in_time(&config, open(&config, request(&config, &specs, servers_train_layers, server), host, epoch)),
        )
        .await?;
        if reply.epoch > epoch && server > 0 {
            // Those before it have followed since, or are about to.
            leaders.clear();
            steps.clear();
        } else {
            leaders.push(leader);
            steps.push(reply.next_step);
        }
        epoch = reply.epoch;
        config.connect_timeout = connect_timeout;
        if reply.next_step >= config.total_steps {
            config.connect_timeout = config.waiting_time_at_end(epoch);
        }
    }
    let routes = leaders.into_iter().map(Route::new).collect();
    let next_step = FirstStep::of(&steps, epoch).step;
    let layers_wanted = AtomicU64::new(0);
    let shared = Shared { config, connect_timeout, specs, servers_train_layers, epoch, routes, layers_wanted };
    Ok((shared, next_step))
}

fn request(config: &SessionConfig, specs: &[TableSpec], servers_train_layers: bool, shard: u32) -> OpenTablesRequest {
    let tables = specs.iter().map(proto::TableSpec::from).collect();
    let Leader { term: leader_term, epoch: leader_epoch } = config.voting.followed(shard);
    let (trainer, shard) = (Some(config.id()), Some(shard));
    OpenTablesRequest { trainer, tables, shard, servers_train_layers, leader_term, leader_epoch }
}

/// Opens the tables of a shard at server `host`; returns the way to it with its reply.
async fn open(
    config: &SessionConfig,
    request: OpenTablesRequest,
    host: u32,
    epoch: u64,
) -> Result<((u32, Channel), proto::OpenTablesReply), Failure> {
    let shard = request.shard.unwrap_or(host);
    let channel = connect(&config.network, &config.servers[host as usize]).await?;
    let mut client = SparseTablesClient::new(channel.clone());
    let reply = match client.open_tables(request.clone()).await {
        // It was started anew since this trainer joined.
        Err(status) if status.code() == Code::Aborted => {
            join(config, None, channel.clone()).await.map_err(Failure::of_entry)?;
            client.open_tables(request).await
        }
        opened => opened,
    };
    let reply = reply.map_err(Failure::of_entry)?;
    let reply = reply.into_inner();
    in_place(config, host, (reply.server, reply.servers))?;
    if reply.epoch < epoch {
        return Err(Status::unavailable("it has yet to go to the checkpoint that the others hold").into());
    }
    config.voting.follow(shard, Leader { term: reply.leader_term, epoch: reply.epoch });
    Ok(((host, channel), reply))
}
