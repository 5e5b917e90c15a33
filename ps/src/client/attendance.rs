//! A trainer's presence at its servers: heartbeats while it trains, and the last words.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message as _;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::config::SessionConfig;
use super::connecting::{connect_lazily, is_refused, join, reason};
use super::error::{ClientError, is_replaced, is_retryable};
use super::recorder::Recorder;
use super::time_spent::TimeSpent;
use crate::network::never_sent;
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;
use crate::retry::{Retries, Schedule};

/// How often a trainer says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Interval where two servers hold each block, so that trainers hear soon of a candidate.
const REPLICATED: Duration = Duration::from_millis(500);
/// Pause between two tries to leave.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a server may take to note that a trainer leaves, or to have room for its last points of metrics.
const LEAVE: Duration = Duration::from_secs(10);
/// Pause before points are sent again for which server 0 had no room, or whose way there broke.
const FULL: Duration = Duration::from_millis(100);
/// Timeout for a trainer that was interrupted or failed: all may have been, and its server may be gone.
const STOP: Duration = Duration::from_secs(3);

/// The report of a trainer about itself.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Steps done, by a trainer that exchanges no gradients, or that leaves; else the servers count them.
    pub step: u64,
    /// Examples read by this process.
    pub examples: u64,
    /// Latest values.
    pub metrics: BTreeMap<String, f64>,
    /// Time that this process has waited for servers and other trainers.
    pub waiting: Duration,
    /// In an elastic job: how often it has entered, and the batches that it has done since.
    pub dealt: (u64, u64),
    /// Where its time has gone, if it measures that.
    pub spent: Option<TimeSpent>,
}

/// Heartbeats to every server, until it is dropped.
#[derive(Default)]
pub struct Attendance {
    servers: BTreeMap<u32, Attended>,
    report: Arc<Mutex<Report>>,
    recorder: Recorder,
}

/// A server that gets heartbeats.
struct Attended {
    client: CoordinationClient<Channel>,
    channel: Channel,
    heartbeats: AbortOnDropHandle<()>,
}

impl Attendance {
    /// Sends heartbeats to `server` over `channel` from now on, and over none it had before.
    pub fn attend(&mut self, config: &SessionConfig, server: u32, channel: Channel) {
        let client = CoordinationClient::new(channel.clone());
        config.last_heard.hear(server);
        let beating = Heartbeats {
            config: config.clone(),
            server,
            client: client.clone(),
            channel: channel.clone(),
            report: self.report.clone(),
            recorder: (server == 0).then(|| self.recorder.clone()),
        };
        let heartbeats = AbortOnDropHandle::new(tokio::spawn(beating.run()));
        self.servers.insert(server, Attended { client, channel, heartbeats });
    }

    /// As [`Attendance::attend`], of a server that may be away, unless it is attended already.
    pub fn attend_lazily(&mut self, config: &SessionConfig, server: u32) {
        if self.servers.contains_key(&server) {
            return;
        }
        // An address that is none was found out before.
        if let Ok(channel) = connect_lazily(&config.network, &config.servers[server as usize]) {
            self.attend(config, server, channel);
        }
    }

    /// Where `server` can be asked something, if it is attended.
    pub fn client(&self, server: u32) -> Option<CoordinationClient<Channel>> {
        self.servers.get(&server).map(|attended| attended.client.clone())
    }

    /// Sets what the next heartbeats report.
    pub fn report(&self, report: Report) {
        *self.report.lock() = report;
    }

    /// Returns where the series of this trainer's metrics are recorded.
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// Leaves every server with what was reported last: `finished` says that the work is done, false that a
    /// replacement will come. Server 0 knows that already of a trainer that has `concluded`. The servers are in `epoch`, 0
    /// where they keep no checkpoints.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub async fn leave(
        self,
        config: &SessionConfig,
        finished: bool,
        concluded: bool,
        epoch: u64,
    ) -> Result<(), ClientError> {
        self.say(config, finished, (concluded, epoch), String::new()).await
    }

    /// Reports to every server that this trainer ends with an error of its own, and which. One that does not answer soon hears
    /// nothing: it will miss the heartbeats.
    pub async fn fail(self, config: &SessionConfig, failure: String) {
        if let Err(error) = self.say(config, false, (false, 0), failure).await {
            tracing::debug!(%error, "not every server has heard why this trainer ends");
        }
    }

    async fn say(
        self,
        config: &SessionConfig,
        finished: bool,
        (concluded, epoch): (bool, u64),
        failure: String,
    ) -> Result<(), ClientError> {
        let report = read(&self.report);
        if let Some(server) = self.servers.get(&0) {
            server.heartbeats.abort();
            let mut client = server.client.clone();
            let deliver = deliver(&mut client, config, &report, &self.recorder);
            let limit = if finished && !config.interrupted() { LEAVE } else { STOP };
            if tokio::time::timeout(limit, deliver).await != Ok(true) {
                tracing::debug!("server 0 does not have the last points of metrics");
            }
        }
        let job_end = JobEnd { may_know: AtomicBool::new(concluded && epoch > 0), ..JobEnd::default() };
        let leaving = self.servers.into_iter().map(|(server, Attended { client, channel, heartbeats })| {
            heartbeats.abort();
            let Report { step, examples, metrics, dealt: (entry, done), .. } = report.clone();
            let trainer = Some(config.id());
            let failure = failure.clone();
            let request = proto::LeaveRequest { trainer, finished, examples, metrics, step, entry, done, failure };
            let may_know = concluded && server == 0;
            let goodbye = Goodbye { config, client, channel, request, server, epoch, may_know, job_end: &job_end };
            async move { (server, goodbye.say().await) }
        });
        let (mut outcome, mut replaced) = (Ok(()), Ok(()));
        for (server, unheard) in futures::future::join_all(leaving).await {
            let Some(Unheard { reason, seconds, is_replaced }) = unheard else { continue };
            let address = config.servers[server as usize].clone();
            if is_replaced {
                replaced = Err(ClientError::Conflict { address, reason });
            } else if config.replication_factor > 1 && (!finished || job_end.heard.load(Ordering::Relaxed))
                || config.supervised && finished && job_end.is_known.load(Ordering::Relaxed)
                || config.elastic && config.interrupted() && job_end.heard.load(Ordering::Relaxed)
            {
                // The servers that are left notify it when it comes back, or whoever starts it names the trainers that are done. In an
                // elastic job it misses the heartbeats, and goes on without this trainer.
                tracing::warn!(%address, reason, "server {server} does not hear that this trainer leaves");
            } else {
                outcome = Err(ClientError::Unreachable { address, seconds, reason });
            }
        }
        replaced.and(outcome)
    }
}

/// The heartbeats to one server.
struct Heartbeats {
    config: SessionConfig,
    server: u32,
    client: CoordinationClient<Channel>,
    channel: Channel,
    report: Arc<Mutex<Report>>,
    /// For server 0.
    recorder: Option<Recorder>,
}

impl Heartbeats {
    async fn run(mut self) {
        let replicated = self.config.replication_factor > 1;
        let mut ticks = tokio::time::interval(if replicated { REPLICATED } else { HEARTBEAT });
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let request = heartbeat(&self.config, &read(&self.report), self.recorder.as_ref());
            match self.client.heartbeat(request).await {
                Ok(reply) => {
                    let reply = reply.into_inner();
                    self.config.last_heard.hear(self.server);
                    self.config.finished_trainers.lock().extend(&reply.finished_trainers);
                    if let Some(recorder) = &self.recorder {
                        recorder.answered(&reply);
                    }
                    self.hear(reply.holders).await;
                }
                // One that is lost is followed by others; whether the server lives shows elsewhere.
                Err(status) => {
                    tracing::debug!(reason = status.message(), "heartbeat failed");
                    self.config.voting.lose(self.server);
                    // It was started anew, and answers.
                    let is_new = status.code() == Code::Aborted;
                    if is_new {
                        self.config.last_heard.hear(self.server);
                    }
                    if replicated && is_new {
                        let reply = proto::HeartbeatReply::decode(status.details()).unwrap_or_default();
                        self.hear(reply.holders).await;
                        // Its blocks have another leader, so only this call makes it know this trainer.
                        drop(join(&self.config, None, self.channel.clone()).await);
                    }
                }
            }
        }
    }

    /// Passes on what the server says of its part in each shard that it holds.
    async fn hear(&self, parts: Vec<proto::ShardHolder>) {
        for holder in parts {
            let holders = self.config.holders(holder.shard);
            if let Some(other) = holders.into_iter().find(|other| *other != self.server) {
                let sides = (self.server, other);
                self.config.voting.hear(self.config.id(), &self.channel, sides, holder).await;
            }
        }
    }
}

fn heartbeat(config: &SessionConfig, report: &Report, recorder: Option<&Recorder>) -> proto::HeartbeatRequest {
    let Report { step, examples, metrics, waiting, dealt: (entry, done), spent } = report.clone();
    let (trainer, waiting_seconds) = (Some(config.id()), waiting.as_secs_f64());
    let spent = spent.map(|spent| spent.message(waiting));
    let (points, points_held) = recorder.map(Recorder::to_send).unwrap_or_default();
    let finished_trainers = config.finished_trainers.lock().iter().copied().collect();
    proto::HeartbeatRequest {
        trainer,
        examples,
        metrics,
        step,
        waiting_seconds,
        entry,
        done,
        points,
        points_held,
        spent,
        finished_trainers,
    }
}

/// Sends server 0 the points that it does not have, again where the connection breaks. Returns whether it has all of them.
async fn deliver(
    server: &mut CoordinationClient<Channel>,
    config: &SessionConfig,
    report: &Report,
    recorder: &Recorder,
) -> bool {
    while !recorder.is_sent() {
        match server.heartbeat(heartbeat(config, report, Some(recorder))).await {
            Ok(reply) if recorder.answered(reply.get_ref()) => {}
            // It has ended, or does not know this trainer any more.
            Err(status) if is_refused(&status) || status.code() == Code::Aborted || !is_retryable(&status) => {
                return false;
            }
            // It has no room for them now, or is away for a moment.
            Ok(_) | Err(_) => tokio::time::sleep(FULL).await,
        }
    }
    true
}

/// The last message of a trainer to one server.
struct Goodbye<'a> {
    config: &'a SessionConfig,
    client: CoordinationClient<Channel>,
    channel: Channel,
    request: proto::LeaveRequest,
    server: u32,
    epoch: u64,
    /// The server may have heard already, and have ended since.
    may_know: bool,
    job_end: &'a JobEnd,
}

/// The knowledge of a trainer that leaves about the end of the job. Server 0 ends when all trainers have left it and what they did
/// is kept; a server that is lost then is never started again, so that no trainer may wait for it.
#[derive(Default)]
struct JobEnd {
    /// Some server has heard that this trainer leaves.
    heard: AtomicBool,
    /// Server 0 has, so that another process of this trainer has nothing to do: it would bring its initial values along.
    is_known: AtomicBool,
    /// Server 0 may have.
    may_know: AtomicBool,
    /// Since when server 0 has not answered.
    away_since: Mutex<Option<Instant>>,
}

impl JobEnd {
    /// Returns whether server 0 may have heard that this trainer leaves, and has ended, as far as a trainer can know: for as long
    /// as a person has to start a server again, nothing answers at its address.
    async fn has_come(&self, config: &SessionConfig) -> bool {
        if !self.may_know.load(Ordering::Relaxed) {
            return false;
        }
        let answer = tokio::time::timeout(LEAVE, config.network.probe(&config.servers[0])).await;
        let mut since = self.away_since.lock();
        if matches!(answer, Ok(Ok(()))) {
            *since = None;
            return false;
        }
        since.get_or_insert_with(Instant::now).elapsed() >= SessionConfig::waiting_time(false)
    }
}

/// The outcome of the last try where a server did not hear it.
struct Unheard {
    reason: String,
    seconds: u64,
    /// The work is done, but another process has this trainer's place: servers wait for that one's end.
    is_replaced: bool,
}

impl Goodbye<'_> {
    /// Says it until it is heard.
    async fn say(mut self) -> Option<Unheard> {
        let config = self.config;
        // A server that does not hear that the work is done waits for this trainer: one that is away for a moment
        // receives the message when it is back. One that holds the other copies passes it on.
        let finished = self.request.finished;
        let waits = || {
            let is_passed_on = config.replication_factor > 1 && self.job_end.heard.load(Ordering::Relaxed);
            finished && !is_passed_on && !config.interrupted()
        };
        let may_end = config.supervised && finished;
        let hurries = !self.request.failure.is_empty() || !finished && config.interrupted();
        let answer = if hurries { STOP } else { LEAVE };
        let limit = if finished { config.waiting_time_at_end(self.epoch) } else { answer };
        let (begun, mut retries) = (Instant::now(), Retries::new(Schedule::every(PAUSE).within(limit)));
        loop {
            let (reason, again, reached) = match tokio::time::timeout(answer, self.attempt()).await {
                Ok(Ok(())) => {
                    self.job_end.heard.store(true, Ordering::Relaxed);
                    self.job_end.may_know.fetch_or(self.server == 0, Ordering::Relaxed);
                    self.job_end.is_known.fetch_or(self.server == 0, Ordering::Relaxed);
                    return None;
                }
                // It knows that this trainer is done.
                Ok(Err(status)) if finished && status.code() == Code::OutOfRange => return None,
                Ok(Err(status)) if finished && is_replaced(&status) => {
                    return Some(Unheard { reason: reason(&status), seconds: 0, is_replaced: true });
                }
                Ok(Err(status)) => (reason(&status), is_retryable(&status), !never_sent(&status)),
                Err(_) => ("no answer".to_owned(), true, true),
            };
            self.may_know |= reached;
            self.job_end.may_know.fetch_or(self.server == 0 && reached, Ordering::Relaxed);
            // One that has heard of the last trainer's end ends too, whether its answer arrives or not.
            let has_ended = finished && self.may_know && !reached;
            let at_least = if config.interrupted() { STOP } else { answer };
            let goes_on = again && (waits() || begun.elapsed() < at_least);
            let is_over = may_end && self.job_end.has_come(config).await;
            if is_over || !goes_on || !retries.pause().await {
                let seconds = begun.elapsed().as_secs();
                self.job_end.heard.fetch_or(has_ended, Ordering::Relaxed);
                return (!has_ended).then_some(Unheard { reason, seconds, is_replaced: false });
            }
        }
    }

    async fn attempt(&mut self) -> Result<(), Status> {
        match self.client.leave(self.request.clone()).await {
            // It was started anew and does not know this trainer yet.
            Err(status) if status.code() == Code::Aborted => {
                join(self.config, None, self.channel.clone()).await?;
                self.client.leave(self.request.clone()).await.map(drop)
            }
            answered => answered.map(drop),
        }
    }
}

fn read(report: &Mutex<Report>) -> Report {
    report.lock().clone()
}
