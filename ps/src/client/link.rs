//! The connection to one server: joins, fills blocks that have no values, opens the training
//! stream and hands on what comes down.

use std::sync::mpsc as std_mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::{ClientError, SessionConfig, is_retryable};
use crate::layout::Layout;
use crate::proto::coordination_client::CoordinationClient;
use crate::proto::parameter_server_client::ParameterServerClient;
use crate::proto::{self, exchange_request::Message};
use crate::server::encode;
use crate::shm::{self, Mapping};

/// What comes from a server.
pub enum Event {
    /// A block's new values.
    Block(proto::ParameterBlock),
    /// The stream broke; `generation` tells which, as a link is made anew after that.
    Broken { server: u32, generation: u64, status: Status },
}

/// An open training stream to one server.
pub struct Link {
    pub generation: u64,
    pub next_step: u64,
    /// Payloads stay in memory that this server has mapped.
    pub shares_memory: bool,
    gradients: mpsc::Sender<proto::ExchangeRequest>,
    channel: Channel,
}

/// Pause before the second try; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A single try takes no longer.
const TRY: Duration = Duration::from_secs(10);
/// After this long without an answer the log says who is waited for.
const QUIET: Duration = Duration::from_secs(3);
const WINDOW: u32 = 8 * 1024 * 1024;
const MAX_MESSAGE: usize = 8 * 1024 * 1024;

impl Link {
    /// Joins `server` and opens the stream, trying until `config.connect_timeout`. The
    /// parameters in `memory` become the values of blocks that have none.
    pub async fn open(
        config: &SessionConfig,
        layout: &Layout,
        server: u32,
        generation: u64,
        memory: &Mapping,
        events: &std_mpsc::Sender<Event>,
    ) -> Result<Self, ClientError> {
        persist(config, server, || Self::attempt(config, layout, server, generation, memory, events)).await
    }

    async fn attempt(
        config: &SessionConfig,
        layout: &Layout,
        server: u32,
        generation: u64,
        memory: &Mapping,
        events: &std_mpsc::Sender<Event>,
    ) -> Result<Self, Failure> {
        let (channel, reply) = enter(config, server).await?;
        let mut client = ParameterServerClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        if !reply.empty_blocks.is_empty() {
            fill(&mut client, config, layout, &reply.empty_blocks, memory.parameters()).await?;
        }
        let blocks = layout.owned_by(server).count();
        // The whole step fits, so that the training thread never waits to hand over a block.
        let (gradients, outgoing) = mpsc::channel(blocks + 1);
        let shared_memory_token = share(config, memory, &reply.shared_memory_socket);
        let open = proto::Open { trainer: Some(config.id()), shared_memory_token };
        send(&gradients, Message::Open(open));
        let mut incoming = client.exchange(ReceiverStream::new(outgoing)).await?.into_inner();
        let events = events.clone();
        tokio::spawn(async move {
            let status = loop {
                match incoming.message().await {
                    Ok(Some(block)) => {
                        if events.send(Event::Block(block)).is_err() {
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
        let shares_memory = shared_memory_token != 0;
        Ok(Self { generation, next_step: reply.next_step, shares_memory, gradients, channel })
    }

    /// Sends one gradient block. A broken link drops it: its `Broken` event follows.
    pub fn gradient(&self, step: u64, block: u32, values: &[f32]) {
        let payload = if self.shares_memory { Bytes::new() } else { encode(values) };
        let codec = proto::Codec::F32.into();
        send(&self.gradients, Message::Gradient(proto::GradientBlock { step, block, codec, payload }));
    }

    /// A client for members and progress on this link's connection.
    pub fn coordination(&self) -> CoordinationClient<Channel> {
        CoordinationClient::new(self.channel.clone())
    }

    /// Current values of the server's blocks.
    pub async fn pull(&self, config: &SessionConfig) -> Result<Vec<proto::ParameterBlock>, Status> {
        let mut client = ParameterServerClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        let request = proto::PullRequest { trainer: Some(config.id()), blocks: Vec::new() };
        let mut stream = client.pull(request).await?.into_inner();
        let mut blocks = Vec::new();
        while let Some(block) = stream.message().await? {
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// Tries until `config.connect_timeout`, unless a server says what it would say again.
pub(super) async fn persist<T, A: Future<Output = Result<T, Failure>>>(
    config: &SessionConfig,
    server: u32,
    attempt: impl Fn() -> A,
) -> Result<T, ClientError> {
    let address = &config.servers[server as usize];
    let start = Instant::now();
    let (mut pause, mut told) = (FIRST_PAUSE, false);
    loop {
        let status = match tokio::time::timeout(TRY, attempt()).await {
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
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects to a server and joins.
pub(super) async fn enter(config: &SessionConfig, server: u32) -> Result<(Channel, proto::JoinReply), Failure> {
    let address = &config.servers[server as usize];
    let channel = connect(address).await?;
    let reply = join(config, channel.clone()).await?;
    let ours = config.servers.len() as u32;
    if (reply.server, reply.servers) != (server, ours) {
        return Err(Failure::Final(ClientError::Misplaced {
            address: address.clone(),
            found: reply.server,
            servers: reply.servers,
            want: server,
            ours,
        }));
    }
    Ok((channel, reply))
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

fn send(gradients: &mpsc::Sender<proto::ExchangeRequest>, message: Message) {
    // Full only if the server takes nothing, closed only if the link is broken: both end the link.
    drop(gradients.try_send(proto::ExchangeRequest { message: Some(message) }));
}

fn reason(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}

async fn connect(address: &str) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| Failure::Final(ClientError::Address(address.to_owned())))?
        .connect_timeout(TRY)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        // A server that is gone without a word must be noticed while the trainer only waits.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true);
    endpoint.connect().await.map_err(|error| Failure::Status(Status::from_error(error.into())))
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

async fn join(config: &SessionConfig, channel: Channel) -> Result<proto::JoinReply, Status> {
    let tensors = config.tensors.iter().map(|t| proto::TensorSpec { name: t.name.clone(), shape: t.shape.clone() });
    let request =
        proto::JoinRequest { trainer: Some(config.id()), tensors: tensors.collect(), total_steps: config.total_steps };
    Ok(CoordinationClient::new(channel).join(Request::new(request)).await?.into_inner())
}

/// Gives values to blocks that have none. Several trainers may do so at once: the first one's stay.
async fn fill(
    client: &mut ParameterServerClient<Channel>,
    config: &SessionConfig,
    layout: &Layout,
    blocks: &[u32],
    parameters: &[f32],
) -> Result<(), Status> {
    let pushes: Vec<_> = blocks
        .iter()
        .map(|block| (*block, encode(&parameters[layout.range(*block)])))
        .enumerate()
        .map(|(i, (block, payload)): (usize, (u32, Bytes))| proto::PushRequest {
            trainer: (i == 0).then(|| config.id()),
            block,
            codec: proto::Codec::F32.into(),
            payload,
        })
        .collect();
    let reply = client.push(tokio_stream::iter(pushes)).await?.into_inner();
    tracing::debug!(blocks = blocks.len(), taken = reply.initialized, "gave values to empty blocks");
    Ok(())
}
