//! The connection to one server: joins, fills blocks that have no values, opens the training
//! stream and hands on what comes down.

use std::cell::Cell;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::{ClientError, SessionConfig, is_retryable};
use crate::codec::Codec;
use crate::layout::Layout;
use crate::network::Network;
use crate::proto::coordination_client::CoordinationClient;
use crate::proto::{self, exchange_request::Message};
use crate::shm::{self, Mapping};
use crate::wire::{self, Buffers, MAX_FRAME, Outgoing, call, frame};

/// What comes from a server.
pub enum Event {
    /// A block's new values; `generation` as below.
    Block { server: u32, generation: u64, block: proto::ParameterBlock },
    /// The stream broke; `generation` tells which, as a link is made anew after that.
    Broken { server: u32, generation: u64, status: Status },
}

/// An open training stream to one server.
pub struct Link {
    pub generation: u64,
    pub next_step: u64,
    /// Counts the times that the servers went back to a checkpoint.
    pub epoch: u64,
    /// Payloads stay in memory that this server has mapped.
    pub shares_memory: bool,
    /// Blocks that may be on their way, where payloads travel.
    pub window: usize,
    /// The server at the other end: the one that is named, or the one that holds its blocks too.
    pub host: u32,
    gradients: mpsc::Sender<Result<Bytes, Status>>,
    channel: Channel,
}

/// What a link is opened with.
pub struct Opening<'a> {
    pub config: &'a SessionConfig,
    pub layout: &'a Layout,
    pub server: u32,
    pub generation: u64,
    /// A server that is behind this epoch is about to follow: it is waited for.
    pub epoch: u64,
    /// Its parameters become the values of blocks that have none, of a server that was started anew.
    pub memory: &'a Mapping,
    /// What becomes their values instead where all servers have gone back to the beginning.
    pub initial: &'a [f32],
    pub buffers: &'a Buffers,
    pub events: &'a mpsc::UnboundedSender<Event>,
}

/// Methods whose messages are written by hand.
const EXCHANGE: &str = "/psjobs.v1.ParameterServer/Exchange";
pub(super) const PULL: &str = "/psjobs.v1.ParameterServer/Pull";
const PUSH: &str = "/psjobs.v1.ParameterServer/Push";

/// Pause before the second try; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A single try takes no longer.
const TRY: Duration = Duration::from_secs(10);
/// After this long without an answer the log says who is waited for.
const QUIET: Duration = Duration::from_secs(3);
const WINDOW: u32 = 4 * 1024 * 1024;
/// How soon an interrupt is seen by a trainer that waits.
const INTERRUPTIBLE: Duration = Duration::from_millis(100);

impl Link {
    /// Joins a server and opens the stream, trying until `config.connect_timeout`.
    pub async fn open(opening: &Opening<'_>) -> Result<Self, ClientError> {
        let holders = opening.config.holders(opening.server);
        let first = Cell::new(0);
        persist(opening.config, opening.server, || {
            // Each is the first one to be asked in turn: one that is silent takes all the time of a try.
            let turn = first.replace(first.get() + 1) % holders.len();
            let order = [&holders[turn..], &holders[..turn]].concat();
            async move {
                let mut refused = None;
                for host in order {
                    match Self::attempt(opening, host).await {
                        Err(Failure::Status(status)) if is_retryable(&status) => {
                            refused.get_or_insert(status);
                        }
                        decided => return decided,
                    }
                }
                Err(refused.expect("a block has a holder").into())
            }
        })
        .await
    }

    async fn attempt(opening: &Opening<'_>, host: u32) -> Result<Self, Failure> {
        let &Opening { config, layout, server, generation, epoch, memory, buffers, events, .. } = opening;
        let (channel, reply) = enter(config, host, Some(server)).await?;
        if reply.epoch < epoch {
            return Err(Status::unavailable("it has yet to go back to the checkpoint that the others hold").into());
        }
        if !reply.empty_blocks.is_empty() {
            fill(channel.clone(), opening, reply.epoch, &reply.empty_blocks).await?;
        }
        // The whole step fits, so that the training thread never waits to hand over a block.
        let (gradients, outgoing) = mpsc::channel(layout.owned_by(server).count() + 1);
        let shared_memory_token = share(config, memory, &reply.shared_memory_socket);
        let shard = Some(server);
        let open = proto::Open { trainer: Some(config.id()), shared_memory_token, epoch: reply.epoch, shard };
        let open = frame::message(&proto::ExchangeRequest { message: Some(Message::Open(open)) });
        drop(gradients.try_send(Ok(open)));
        let mut incoming = call(channel.clone(), EXCHANGE, Outgoing::request(outgoing), buffers).await?;
        let events = events.clone();
        tokio::spawn(async move {
            let status = loop {
                match incoming.message().await {
                    Ok(Some(block)) => {
                        if events.send(Event::Block { server, generation, block }).is_err() {
                            return; // The session is gone.
                        }
                    }
                    Ok(None) => break Status::unavailable("the server closed the stream"),
                    Err(status) => break status,
                }
            };
            // If the session is gone nobody needs to know.
            drop(events.send(Event::Broken { server, generation, status }));
        });
        let (next_step, epoch, shares_memory) = (reply.next_step, reply.epoch, shared_memory_token != 0);
        let window = (reply.window as usize).clamp(1, wire::WINDOW);
        Ok(Self { generation, next_step, epoch, shares_memory, window, host, gradients, channel })
    }

    /// Sends one message. A broken link drops it: its `Broken` event follows.
    pub fn send(&self, message: Bytes) {
        drop(self.gradients.try_send(Ok(message)));
    }

    /// This link's connection.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Waits until losing servers can no longer cost a step of this trainer, which has given its last one.
    pub async fn conclude(&self, config: &SessionConfig) -> Result<(), Status> {
        let request = proto::ConcludeRequest { trainer: Some(config.id()), epoch: self.epoch };
        CoordinationClient::new(self.channel()).conclude(request).await.map(drop)
    }

    /// Current values of the server's blocks.
    pub async fn pull(
        &self,
        config: &SessionConfig,
        server: u32,
        buffers: &Buffers,
    ) -> Result<Vec<proto::ParameterBlock>, Status> {
        let request = proto::PullRequest { trainer: Some(config.id()), shard: Some(server), ..Default::default() };
        let mut stream = call(self.channel(), PULL, once(frame::message(&request)), buffers).await?;
        let mut blocks = Vec::new();
        while let Some(block) = stream.message().await? {
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// A request of one message.
pub(super) fn once(message: Bytes) -> Outgoing {
    let (sender, receiver) = mpsc::channel(1);
    drop(sender.try_send(Ok(message)));
    Outgoing::request(receiver)
}

/// Tries until `config.connect_timeout`, unless a server says what it would say again.
pub(super) async fn persist<T, A: Future<Output = Result<T, Failure>>>(
    config: &SessionConfig,
    server: u32,
    attempt: impl Fn() -> A,
) -> Result<T, ClientError> {
    let address = &config.servers[server as usize];
    let start = Instant::now();
    let (mut pause, mut told, mut tries) = (FIRST_PAUSE, false, 0);
    loop {
        let tried = tokio::select! {
            biased;
            tried = tokio::time::timeout(TRY, attempt()) => tried,
            // A server that is gone with its address lets a try take all its time.
            () = until(|| config.interrupted()) => return Err(ClientError::Interrupted),
        };
        let status = match tried {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(Failure::Final(error))) => return Err(error),
            Ok(Err(Failure::Status(status))) if !is_retryable(&status) => {
                return Err(ClientError::Refused { address: address.clone(), reason: status.message().to_owned() });
            }
            Ok(Err(Failure::Status(status))) => reason(&status),
            Err(_) => "no answer".to_owned(),
        };
        if start.elapsed() + pause >= config.connect_timeout {
            let seconds = config.connect_timeout.as_secs();
            return Err(ClientError::Unreachable { address: address.clone(), seconds, reason: status });
        }
        if !told && start.elapsed() >= QUIET {
            tracing::info!(%address, reason = %status, "waiting for server {server}");
            told = true;
        }
        tokio::time::sleep(pause.mul_f64(spread(config.trainer, server, tries))).await;
        tries += 1;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The share of a pause that is waited, from a half to all of it: another one for each trainer and try, so that
/// those who lost a server together do not come back together.
fn spread(trainer: u32, server: u32, tries: u32) -> f64 {
    let mixed = [server, tries].into_iter().fold(trainer, |mixed, more| {
        let mixed = (mixed ^ more.rotate_left(16)).wrapping_add(1).wrapping_mul(0x9e37_79b1);
        mixed ^ (mixed >> 15)
    });
    0.5 + f64::from(mixed) / f64::from(u32::MAX) / 2.0
}

/// Connects to a server and joins, for the blocks of server `shard` if it is named.
pub(super) async fn enter(
    config: &SessionConfig,
    server: u32,
    shard: Option<u32>,
) -> Result<(Channel, proto::JoinReply), Failure> {
    let address = &config.servers[server as usize];
    let channel = connect(&config.network, address).await?;
    let reply = join(config, shard, channel.clone()).await?;
    in_place(config, server, (reply.server, reply.servers))?;
    Ok((channel, reply))
}

/// Whether the server that answered is the one that was meant, by what it says of itself.
pub(super) fn in_place(config: &SessionConfig, want: u32, (found, servers): (u32, u32)) -> Result<(), Failure> {
    let ours = config.servers.len() as u32;
    if (found, servers) == (want, ours) {
        return Ok(());
    }
    let address = config.servers[want as usize].clone();
    Err(Failure::Final(ClientError::Misplaced { address, found, servers, want, ours }))
}

pub(super) enum Failure {
    Status(Status),
    Final(ClientError),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// Whether nobody listens at the other end, so that nothing was heard.
pub(super) fn is_refused(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        source = error.source();
    }
    false
}

pub(super) fn reason(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}

pub(super) async fn connect(network: &Network, address: &str) -> Result<Channel, Failure> {
    network
        .connect(&endpoint(network, address)?)
        .await
        .map_err(|error| Failure::Status(Status::from_error(error.into())))
}

/// As [`connect`], at the first call, and again after each that fails.
pub(super) fn connect_lazily(network: &Network, address: &str) -> Result<Channel, Failure> {
    Ok(network.connect_lazy(&endpoint(network, address)?))
}

fn endpoint(network: &Network, address: &str) -> Result<Endpoint, Failure> {
    Ok((network.endpoint(address))
        .map_err(|_| Failure::Final(ClientError::Address(address.to_owned())))?
        .connect_timeout(TRY)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_frame_size(MAX_FRAME)
        // A server that is gone without a word must be noticed while the trainer only waits.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true))
}

/// Hands the memory to a server that offers to share it and is within reach; the token, 0 for none.
fn share(config: &SessionConfig, memory: &Mapping, socket: &str) -> u64 {
    if !config.shared_memory || socket.is_empty() {
        return 0;
    }
    shm::accept(socket, memory).unwrap_or_else(|error| {
        tracing::debug!(%error, "no shared memory with this server; using TCP");
        0
    })
}

/// Waits for something that nobody rings a bell for.
pub(super) async fn until(happens: impl Fn() -> bool) {
    while !happens() {
        tokio::time::sleep(INTERRUPTIBLE).await;
    }
}

/// Joins, for the blocks of server `shard` if it is named.
pub(super) async fn join(
    config: &SessionConfig,
    shard: Option<u32>,
    channel: Channel,
) -> Result<proto::JoinReply, Status> {
    let tensors = config.tensors.iter().map(|t| proto::TensorSpec { name: t.name.clone(), shape: t.shape.clone() });
    let (trainer, tensors, total_steps) = (Some(config.id()), tensors.collect(), config.total_steps);
    let request = proto::JoinRequest { trainer, tensors, total_steps, shard, elastic: config.elastic };
    Ok(CoordinationClient::new(channel).join(Request::new(request)).await?.into_inner())
}

/// Gives values to blocks that have none, in `epoch`. Several trainers may do so at once: the first one's stay.
async fn fill(channel: Channel, opening: &Opening<'_>, epoch: u64, blocks: &[u32]) -> Result<(), Status> {
    let &Opening { config, layout, memory, initial, buffers, .. } = opening;
    let values = if epoch > 0 && !initial.is_empty() { initial } else { memory.parameters() };
    let (sender, receiver) = mpsc::channel(1);
    let send = async {
        for (i, block) in blocks.iter().enumerate() {
            let payload = bytemuck::cast_slice(&values[layout.range(*block)]);
            let push = proto::PushRequest {
                trainer: (i == 0).then(|| config.id()),
                block: *block,
                codec: Codec::F32.number(),
                payload: Bytes::copy_from_slice(payload),
            };
            if sender.send(Ok(frame::message(&push))).await.is_err() {
                break; // The call has ended; its status says why.
            }
        }
        drop(sender);
        Ok::<_, Status>(())
    };
    let take = async { call(channel, PUSH, Outgoing::request(receiver), buffers).await?.message().await };
    let ((), reply) = tokio::try_join!(send, take)?;
    let taken = reply.map_or(0, |reply: proto::PushReply| reply.initialized);
    tracing::debug!(blocks = blocks.len(), taken, "gave values to empty blocks");
    Ok(())
}
