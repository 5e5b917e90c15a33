//! Reaches a server: connects, joins, and repeats both until it answers.

use std::time::Duration;

use prost::Message as _;
use psjobs_api::Role;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::ballots::Leader;
use super::config::SessionConfig;
use super::error::{ClientError, is_of_another_job, is_retryable};
use crate::network::Network;
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;
use crate::retry::{self, LOG_INTERVAL, Schedule, Stopped, retry};
use crate::wire::MAX_FRAME;

/// Pause before the second attempt; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Timeout of one attempt.
pub(super) const TRY: Duration = Duration::from_secs(10);
/// Time without an answer after which the log names the server, and then every 30 s.
const QUIET: Duration = Duration::from_secs(3);
/// How long a server may take to let a trainer in, where the other holder of its blocks may lead them.
const ENTER: Duration = Duration::from_secs(3);
const WINDOW: u32 = 4 * 1024 * 1024;
/// How soon an interrupt is seen by a trainer that waits.
pub(super) const INTERRUPTIBLE: Duration = Duration::from_millis(100);

/// Repeats `attempt` until `config.connect_timeout`, unless the server gives an answer that it would give again; see
/// [`Failure::may_pass`].
pub(super) async fn persist<T, A: Future<Output = Result<T, Failure>>>(
    config: &SessionConfig,
    server: u32,
    attempt: impl Fn() -> A,
) -> Result<T, ClientError> {
    let (address, supervised) = (&config.servers[server as usize], config.supervised);
    let attempt = || {
        // A server that is gone with its address lets an attempt take all its time.
        let tried = tokio::time::timeout(TRY, attempt());
        async move {
            match tried.await {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(failure)) if failure.may_pass(supervised) => Err(retry::Failure::Transient(failure.reason())),
                Ok(Err(Failure::Final(error))) => Err(retry::Failure::Permanent(error)),
                Ok(Err(Failure::Status(status))) => {
                    Err(retry::Failure::Permanent(ClientError::refused(address, &status)))
                }
                Err(_) => Err(retry::Failure::Transient("no answer".to_owned())),
            }
        }
    };
    let mut due = QUIET;
    let log = |reason: &String, elapsed: Duration| {
        if elapsed >= due {
            tracing::info!(%address, %reason, seconds = elapsed.as_secs(), "waiting for server {server}");
            due = if due == QUIET { LOG_INTERVAL } else { elapsed + LOG_INTERVAL };
        }
    };
    let schedule = schedule(config, server).within(config.connect_timeout);
    let done = retry(schedule, until(|| config.interrupted()), attempt, log).await;
    done.map_err(|why| stopped(config, server, config.connect_timeout, why))
}

/// As [`persist`], at each server that may lead the blocks and rows of `shard`: first at those that are not
/// `silent`. An attempt to enter is to end within [`ENTER`], so that the other one gets its chance.
pub(super) async fn persist_any<T, A: Future<Output = Result<T, Failure>>>(
    config: &SessionConfig,
    shard: u32,
    silent: impl Fn(u32) -> bool,
    attempt: impl Fn(u32) -> A,
) -> Result<T, ClientError> {
    let (holders, attempt, silent, supervised) = (config.holders(shard), &attempt, &silent, config.supervised);
    persist(config, shard, || {
        let mut order = holders.clone();
        order.sort_by_key(|host| silent(*host));
        async move {
            let mut refused = None;
            for host in order {
                match attempt(host).await {
                    Err(failure) if failure.may_pass(supervised) => {
                        refused.get_or_insert(failure);
                    }
                    decided => return decided,
                }
            }
            Err(refused.expect("a shard has a holder"))
        }
    })
    .await
}

/// Returns the pauses between attempts to reach `server`. They differ by trainer, so that the trainers that lost a
/// server together do not return together.
pub(super) fn schedule(config: &SessionConfig, server: u32) -> Schedule {
    Schedule::growing(FIRST_PAUSE, LONGEST_PAUSE).spread_by(retry::key(config.trainer, server))
}

/// Returns the error of a trainer that has given up on `server`, after `limit` if that was the reason.
pub(super) fn stopped(
    config: &SessionConfig,
    server: u32,
    limit: Duration,
    why: Stopped<ClientError, String>,
) -> ClientError {
    match why {
        Stopped::Permanent(error) => error,
        Stopped::TimedOut(reason) => unreachable(config, server, limit, &reason),
        Stopped::Cancelled => ClientError::Interrupted,
    }
}

/// Returns the error for a server that did not answer for `limit`.
pub(super) fn unreachable(config: &SessionConfig, server: u32, limit: Duration, reason: &str) -> ClientError {
    let (address, seconds) = (config.servers[server as usize].clone(), limit.as_secs());
    ClientError::Unreachable { address, seconds, reason: reason.to_owned() }
}

/// Limits an attempt to be let in by a server where another one may lead its blocks.
pub(super) async fn in_time<T>(
    config: &SessionConfig,
    attempt: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let limit = if config.replication_factor > 1 { ENTER } else { TRY };
    let tried = tokio::time::timeout(limit, attempt).await;
    tried.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer").into()))
}

/// Connects to a server and joins, for the blocks of server `shard` if it is named. A candidate to lead them gets this
/// trainer's vote first.
pub(super) async fn enter(
    config: &SessionConfig,
    server: u32,
    shard: Option<u32>,
) -> Result<(Channel, proto::JoinReply), Failure> {
    let address = &config.servers[server as usize];
    in_time(config, async {
        let channel = connect(&config.network, address).await?;
        let led = shard.map(|shard| (shard, config.voting.followed(shard)));
        let mut joined = join(config, led, channel.clone()).await;
        if let Err(status) = &joined
            && let Some(holder) = holder(status)
            && config.voting.consider(config.id(), channel.clone(), server, &holder).await
        {
            joined = join(config, led, channel.clone()).await;
        }
        let reply = joined.map_err(Failure::of_entry)?;
        in_place(config, server, (reply.server, reply.servers))?;
        Ok((channel, reply))
    })
    .await
}

/// Returns the holder that refused a trainer because it does not lead, or not yet.
fn holder(status: &Status) -> Option<proto::ShardHolder> {
    if status.code() != Code::Unavailable || status.details().is_empty() {
        return None;
    }
    proto::ShardHolder::decode(status.details()).ok()
}

/// Joins, for the blocks of a shard if it is named, with the newest leader that has given this trainer its blocks.
pub(super) async fn join(
    config: &SessionConfig,
    shard: Option<(u32, Leader)>,
    channel: Channel,
) -> Result<proto::JoinReply, Status> {
    let tensors = config.tensors.iter().map(proto::TensorSpec::from);
    let (trainer, tensors) = (Some(config.id()), tensors.collect());
    // Servers take 0 for a number that is not known.
    let total_steps = if config.total_steps == SessionConfig::UNKNOWN_STEPS { 0 } else { config.total_steps };
    let Leader { term: leader_term, epoch: leader_epoch } = shard.map(|(_, leader)| leader).unwrap_or_default();
    let (shard, elastic) = (shard.map(|(shard, _)| shard), config.elastic);
    let local_steps = config.local_steps;
    let request =
        proto::JoinRequest { trainer, tensors, total_steps, shard, elastic, leader_term, leader_epoch, local_steps };
    Ok(CoordinationClient::new(channel).join(Request::new(request)).await?.into_inner())
}

/// Asks server 0, which writes the checkpoints, to answer when losing servers can no longer cost one of the `steps` that this
/// trainer has given, the last one in `epoch`.
pub(super) async fn wait_until_durable(config: &SessionConfig, epoch: u64, steps: u64) -> Result<(), Failure> {
    let request = proto::WaitUntilDurableRequest { trainer: Some(config.id()), epoch, steps };
    let channel = connect(&config.network, &config.servers[0]).await?;
    let mut client = CoordinationClient::new(channel.clone());
    match client.wait_until_durable(request.clone()).await {
        // It was started anew and does not know this trainer yet.
        Err(status) if status.code() == Code::Aborted => {
            join(config, None, channel).await?;
            Ok(client.wait_until_durable(request).await.map(drop)?)
        }
        answered => Ok(answered.map(drop)?),
    }
}

/// Returns whether this is the answer of a server 0 that is there, but has no checkpoint with the step yet.
pub(super) fn is_not_kept(status: &Status) -> bool {
    status.code() == Code::Internal
}

/// Checks that the server that answered is the one that was meant, by what it says of itself.
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

impl Failure {
    /// Takes the answer of a server that does not let a trainer in. One that says that the trainers have finished says so again.
    pub(super) fn of_entry(status: Status) -> Self {
        match status.code() {
            Code::OutOfRange => Self::Final(ClientError::Over { reason: status.message().to_owned() }),
            _ => Self::Status(status),
        }
    }

    /// Returns whether another attempt may succeed. Where somebody (`supervised`) starts servers again, it may also after
    /// the answer of a wrong server: that one has got the address of a server that is away, and the name leads to that
    /// server's successor soon. By hand a wrong address stays wrong.
    fn may_pass(&self, supervised: bool) -> bool {
        match self {
            Self::Status(status) => is_retryable(status) || supervised && is_of_another_job(status),
            Self::Final(error) => supervised && matches!(error, ClientError::Misplaced { .. }),
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Status(status) => reason(status),
            Self::Final(error) => error.to_string(),
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// Returns whether the connection was refused, so that the request reached no process.
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

/// Words of causes that do not say what to do, and what that is.
const HINTS: [(&str, &str); 4] = [
    (
        "frame with invalid size",
        "the other side does not talk gRPC without TLS; where it has certificates, this process needs its own: \
         --tls-dir or PSJOB_TLS_DIR, a folder that `psjobs certificates DIR` writes",
    ),
    // Such a side closes the connection, sometimes before its alert is read.
    (
        "stream closed because of a broken pipe",
        "the other side ended the connection as it began; where it has certificates, this process needs its own: \
         --tls-dir or PSJOB_TLS_DIR, a folder that `psjobs certificates DIR` writes",
    ),
    (
        "corrupt message of type InvalidContentType",
        "the other side talks without TLS; give it certificates of this job by --tls-dir, or this process none",
    ),
    (
        "invalid peer certificate",
        "the other side's certificate is not of this job; take those of all its processes from one call of \
         `psjobs certificates DIR`",
    ),
];

/// Returns the cause of a failed attempt, and what to do about it where the cause alone does not say it.
pub(super) fn reason(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    match HINTS.iter().find(|(words, _)| text.contains(words)) {
        Some((_, hint)) => format!("{text}: {hint}"),
        None => text,
    }
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
    Ok((network.endpoint(address, Some(Role::Server)))
        .map_err(|_| Failure::Final(ClientError::Address(address.to_owned())))?
        .connect_timeout(TRY)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_frame_size(MAX_FRAME))
}

/// Waits until `happens` returns true; for conditions without a notification.
pub(super) async fn until(happens: impl Fn() -> bool) {
    while !happens() {
        tokio::time::sleep(INTERRUPTIBLE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_server_is_waited_for_only_where_somebody_starts_servers_again() {
        let other = "this server belongs to another job than job-2, the trainer's; check the address";
        let misplaced = ClientError::Misplaced { address: "ps-0:29500".into(), found: 1, servers: 2, want: 0, ours: 2 };
        let rows = [
            (Failure::Status(Status::unavailable("connection refused")), (true, true)),
            (Failure::Final(misplaced), (false, true)),
            (Failure::Status(Status::failed_precondition(other)), (false, true)),
            (Failure::Status(Status::failed_precondition("trainer 0 was replaced")), (false, false)),
            (Failure::Status(Status::invalid_argument("trainer 5 is beyond this job's 2 trainers")), (false, false)),
            (Failure::Final(ClientError::Over { reason: "the trainers have finished".into() }), (false, false)),
            (Failure::Final(ClientError::Address("ps-0".into())), (false, false)),
        ];
        for (failure, want) in rows {
            assert_eq!((failure.may_pass(false), failure.may_pass(true)), want, "{}", failure.reason());
        }
    }
}
