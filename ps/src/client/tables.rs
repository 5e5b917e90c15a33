//! A trainer's way to the job's sparse tables: deals keys out to the servers that have their rows, and
//! puts the answers together. Pulls and pushes can be begun and waited for later, so that they travel
//! while the trainer computes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::connecting::{Failure, connect, in_place, join, persist, until};
use super::{ClientError, SessionConfig, is_retryable, network};
use crate::proto::sparse_tables_client::SparseTablesClient;
use crate::proto::{self, OpenTablesRequest, PullRowsRequest, PushRowsRequest};
use crate::sparse::{MAX_MESSAGE, TableSpec, key};

/// Pause before the second try; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

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

/// The job's sparse tables, as one trainer sees them. The trainer takes part in the job as a
/// [`Member`](super::Member) of the same configuration.
pub struct Tables {
    pub(super) shared: Arc<Shared>,
    next_step: u64,
    waiting: Duration,
    pub(super) runtime: Runtime,
}

/// All tables, as they were opened.
pub(super) struct Shared {
    pub config: SessionConfig,
    specs: Vec<TableSpec>,
    /// Counts the times that the servers went to a checkpoint; 0 where they keep none.
    pub epoch: u64,
    clients: Vec<SparseTablesClient<Channel>>,
    /// To server 0.
    pub lead: Channel,
    /// As `PushRowsReply.layers_wanted_at` said last.
    pub layers_wanted: AtomicU64,
}

/// Rows on their way.
#[derive(Debug)]
#[must_use = "the rows come with Tables::pulled"]
pub struct Pulling(JoinHandle<Result<Vec<Vec<f32>>, ClientError>>);

/// Gradients on their way.
#[derive(Debug)]
#[must_use = "Tables::pushed says when the trainer may go on"]
pub struct Pushing(JoinHandle<Result<(), ClientError>>);

impl Tables {
    /// Tells every server the job's tables, which must be the same for all trainers.
    ///
    /// # Errors
    /// If a server stays away, or refuses the tables.
    pub fn open(config: SessionConfig, specs: Vec<TableSpec>) -> Result<Self, ClientError> {
        let runtime = network(1)?;
        let (shared, next_step) = runtime.block_on(open_all(config, specs, false))?;
        Ok(Self { shared: Arc::new(shared), next_step, waiting: Duration::ZERO, runtime })
    }

    /// Opens the tables again, when the servers have gone to a checkpoint: what is on its way is lost, and the next
    /// step may be an earlier one.
    ///
    /// # Errors
    /// As [`Tables::open`].
    pub fn reopen(&mut self) -> Result<(), ClientError> {
        let start = Instant::now();
        let Shared { config, specs, .. } = &*self.shared;
        let (shared, next_step) = self.runtime.block_on(open_all(config.clone(), specs.clone(), true))?;
        (self.shared, self.next_step) = (Arc::new(shared), next_step);
        self.waiting += start.elapsed();
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

    /// Time spent waiting for rows and for the consistency rule so far.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Asks for the rows of keys, by table. A key that nobody has trained comes with its initial values.
    pub fn begin_pull(&self, wanted: &[(usize, &[u64])]) -> Pulling {
        let wanted: Vec<(usize, Vec<u64>)> = wanted.iter().map(|(table, keys)| (*table, keys.to_vec())).collect();
        let shared = self.shared.clone();
        Pulling(self.runtime.spawn(async move { shared.pull(&wanted).await }))
    }

    /// The rows, of each of those wanted one behind the other in the order of its keys.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    pub fn pulled(&mut self, pulling: Pulling) -> Result<Vec<Vec<f32>>, ClientError> {
        let start = Instant::now();
        let rows = self.runtime.block_on(pulling.0).map_err(|_| ClientError::Interrupted)?;
        self.waiting += start.elapsed();
        rows
    }

    /// Both at once.
    ///
    /// # Errors
    /// As [`Tables::pulled`].
    pub fn pull(&mut self, wanted: &[(usize, &[u64])]) -> Result<Vec<Vec<f32>>, ClientError> {
        let pulling = self.begin_pull(wanted);
        self.pulled(pulling)
    }

    /// Sends all gradients of a step, at most one set for each table. Sent again, they are not applied again.
    ///
    /// # Panics
    /// If a set has not as many rows as keys.
    pub fn begin_push(&self, step: u64, gradients: &[RowGradients]) -> Pushing {
        let requests = self.shared.requests(step, gradients);
        let shared = self.shared.clone();
        Pushing(self.runtime.spawn(async move { shared.push(requests).await }))
    }

    /// Waits until the consistency rule lets this trainer go on.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    pub fn pushed(&mut self, pushing: Pushing) -> Result<(), ClientError> {
        let start = Instant::now();
        let done = self.runtime.block_on(pushing.0).map_err(|_| ClientError::Interrupted)?;
        self.waiting += start.elapsed();
        done
    }

    /// As [`Tables::pushed`], but gives up waiting when `other` is set. The gradients arrive all the same.
    ///
    /// # Errors
    /// As [`Tables::pushed`]; [`ClientError::Interrupted`] when `other` is set.
    pub fn pushed_unless(&mut self, pushing: Pushing, other: &AtomicBool) -> Result<(), ClientError> {
        let start = Instant::now();
        let done = self.runtime.block_on(async {
            tokio::select! {
                done = pushing.0 => done.map_err(|_| ClientError::Interrupted)?,
                () = until(|| other.load(Ordering::Acquire)) => Err(ClientError::Interrupted),
            }
        });
        self.waiting += start.elapsed();
        done
    }

    /// Both at once.
    ///
    /// # Errors
    /// As [`Tables::pushed`].
    pub fn push(&mut self, step: u64, gradients: &[RowGradients]) -> Result<(), ClientError> {
        let pushing = self.begin_push(step, gradients);
        self.pushed(pushing)
    }
}

/// A trainer that died while it pushed left some servers a step behind the others, and does that step
/// again; one that is further behind was started anew and has nothing to catch up on.
fn first_step(steps: &[u64]) -> u64 {
    let newest = steps.iter().copied().max().unwrap_or(0);
    steps.iter().copied().filter(|step| step + 1 >= newest).min().unwrap_or(0)
}

/// Opens them at every server, all in one epoch. `again`: servers that were started anew do not know this trainer.
async fn open_all(config: SessionConfig, specs: Vec<TableSpec>, again: bool) -> Result<(Shared, u64), ClientError> {
    let (mut epoch, mut channels, mut steps) = (0, Vec::new(), Vec::new());
    while channels.len() < config.servers.len() {
        let server = channels.len() as u32;
        let (channel, reply) = persist(&config, server, || open(&config, &specs, server, (epoch, again))).await?;
        if reply.epoch > epoch && server > 0 {
            // Those before it have followed since, or are about to.
            channels.clear();
            steps.clear();
        } else {
            channels.push(channel);
            steps.push(reply.next_step);
        }
        epoch = reply.epoch;
    }
    let client = |channel: &Channel| SparseTablesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
    let (clients, lead) = (channels.iter().map(client).collect(), channels.swap_remove(0));
    let next_step = first_step(&steps);
    Ok((Shared { config, specs, epoch, clients, lead, layers_wanted: AtomicU64::new(0) }, next_step))
}

async fn open(
    config: &SessionConfig,
    specs: &[TableSpec],
    server: u32,
    (epoch, again): (u64, bool),
) -> Result<(Channel, proto::OpenTablesReply), Failure> {
    let channel = connect(&config.network, &config.servers[server as usize]).await?;
    if again {
        join(config, None, channel.clone()).await?;
    }
    let tables = specs.iter().map(proto::TableSpec::from).collect();
    let request = OpenTablesRequest { trainer: Some(config.id()), tables };
    let reply = SparseTablesClient::new(channel.clone()).open_tables(request).await?.into_inner();
    in_place(config, server, (reply.server, reply.servers))?;
    if reply.epoch < epoch {
        return Err(Status::unavailable("it has yet to go to the checkpoint that the others hold").into());
    }
    Ok((channel, reply))
}

impl Shared {
    /// The same for a trainer that was told to stop, and still has something to say.
    pub fn uninterrupted(&self) -> Self {
        Self {
            config: SessionConfig { interrupt: Arc::default(), ..self.config.clone() },
            specs: self.specs.clone(),
            epoch: self.epoch,
            clients: self.clients.clone(),
            lead: self.lead.clone(),
            layers_wanted: AtomicU64::new(0),
        }
    }

    async fn pull(&self, wanted: &[(usize, Vec<u64>)]) -> Result<Vec<Vec<f32>>, ClientError> {
        let servers = self.clients.len();
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
            let request = PullRowsRequest { trainer: Some(self.config.id()), wanted, epoch: self.epoch };
            let reply = self
                .insist(server, |mut client| {
                    let request = request.clone();
                    async move { client.pull_rows(request).await }
                })
                .await?;
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
    fn requests(&self, step: u64, gradients: &[RowGradients]) -> Vec<PushRowsRequest> {
        let servers = self.clients.len();
        let mut requests: Vec<PushRowsRequest> = (0..servers)
            .map(|_| PushRowsRequest { trainer: Some(self.config.id()), step, tables: Vec::new(), epoch: self.epoch })
            .collect();
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

    async fn push(&self, requests: Vec<PushRowsRequest>) -> Result<(), ClientError> {
        let pushed = requests.into_iter().enumerate().map(|(server, request)| async move {
            let bytes: usize = request.tables.iter().map(|t| t.keys.len() * 8 + t.gradients.len()).sum();
            if bytes + 4096 > MAX_MESSAGE {
                let reason = format!("a push of {bytes} bytes is longer than a message may be, {MAX_MESSAGE}");
                return Err(self.refused(server, format!("{reason}; read fewer examples in a step")));
            }
            self.insist(server, |mut client| {
                let request = request.clone();
                async move { client.push_rows(request).await }
            })
            .await
        });
        let replies = try_join_all(pushed).await?;
        let wanted = replies.first().map_or(0, |of_server_0| of_server_0.layers_wanted_at);
        self.layers_wanted.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    /// Calls a server until it answers, for as long as a server may be away. There is no deadline for the
    /// answer itself: it may have to wait for other trainers. That a server is gone shows by its
    /// connection.
    pub async fn insist<T, F: Future<Output = Result<Response<T>, Status>>>(
        &self,
        server: usize,
        call: impl Fn(SparseTablesClient<Channel>) -> F,
    ) -> Result<T, ClientError> {
        let answer = async {
            let (mut away, mut pause) = (None::<Instant>, FIRST_PAUSE);
            loop {
                let status = match call(self.clients[server].clone()).await {
                    Ok(reply) => return Ok(reply.into_inner()),
                    Err(status) if status.code() == Code::Aborted => {
                        return Err(ClientError::TablesLost { address: self.config.servers[server].clone() });
                    }
                    Err(status) if !is_retryable(&status) => return Err(self.refused(server, status.message())),
                    Err(status) => status,
                };
                let since = *away.get_or_insert_with(Instant::now);
                if since.elapsed() + pause >= self.config.connect_timeout {
                    return Err(ClientError::Unreachable {
                        address: self.config.servers[server].clone(),
                        seconds: self.config.connect_timeout.as_secs(),
                        reason: status.message().to_owned(),
                    });
                }
                tracing::debug!(server, reason = status.message(), "asking again");
                tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        tokio::select! {
            answer = answer => answer,
            () = until(|| self.config.interrupted()) => Err(ClientError::Interrupted),
        }
    }

    pub fn refused(&self, server: usize, reason: impl Into<String>) -> ClientError {
        ClientError::Refused { address: self.config.servers[server].clone(), reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_goes_on_where_its_servers_are() {
        for (label, steps, want) in [
            ("all alike", &[4, 4][..], 4),
            ("died while it pushed", &[5, 4], 4),
            ("a server was started anew", &[7, 0, 6], 6),
            ("at the start", &[0, 1], 0),
            ("no server", &[], 0),
        ] {
            assert_eq!(first_step(steps), want, "{label}");
        }
    }
}
