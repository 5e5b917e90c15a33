//! Reaching a server: connecting, joining, and trying again until somebody answers.

use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::{ClientError, SessionConfig, is_retryable};
use crate::network::Network;
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;
use crate::wire::MAX_FRAME;

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

/// Tries until `config.connect_timeout`, unless a server says what it would say again.
pub(super) async fn persist<T, A: Future<Output = Result<T, Failure>>>(
    config: &SessionConfig,
    server: u32,
    attempt: impl Fn() -> A,
) -> Result<T, ClientError> {
    let address = &config.servers[server as usize];
    let start = Instant::now();
    let (mut pauses, mut told) = (Pauses::new(config.trainer, server), false);
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
                return Err(ClientError::refused(address, &status));
            }
            Ok(Err(Failure::Status(status))) => reason(&status),
            Err(_) => "no answer".to_owned(),
        };
        if start.elapsed() + pauses.next >= config.connect_timeout {
            let seconds = config.connect_timeout.as_secs();
            return Err(ClientError::Unreachable { address: address.clone(), seconds, reason: status });
        }
        if !told && start.elapsed() >= QUIET {
            tracing::info!(%address, reason = %status, "waiting for server {server}");
            told = true;
        }
        pauses.pause().await;
    }
}

/// Pauses between tries, which grow.
pub(super) struct Pauses {
    trainer: u32,
    server: u32,
    tries: u32,
    /// The longest that the next one takes.
    pub next: Duration,
}

impl Pauses {
    pub fn new(trainer: u32, server: u32) -> Self {
        Self { trainer, server, tries: 0, next: FIRST_PAUSE }
    }

    pub async fn pause(&mut self) {
        tokio::time::sleep(self.next.mul_f64(spread(self.trainer, self.server, self.tries))).await;
        self.tries += 1;
        self.next = (self.next * 2).min(LONGEST_PAUSE);
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

/// Waits for something that nobody rings a bell for.
pub(super) async fn until(happens: impl Fn() -> bool) {
    while !happens() {
        tokio::time::sleep(INTERRUPTIBLE).await;
    }
}
