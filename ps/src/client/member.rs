//! A trainer that exchanges no gradient blocks, because its parameters live elsewhere: it takes part
//! in the job's life and reports its progress.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::runtime::Runtime;

use super::attendance::{Attendance, Report};
use super::config::SessionConfig;
use super::connecting::{enter, persist_any};
use super::error::ClientError;
use super::recorder::Recorder;
use super::runtime::network;
use super::time_spent::TimeSpent;
use crate::proto;

/// How long server 0 may take to say who has finished.
const ANSWER: Duration = Duration::from_secs(2);

/// A trainer's place in a job whose servers train no blocks for it, on the runtime of its caller.
pub struct AsyncMember {
    config: SessionConfig,
    attendance: Attendance,
    /// The epoch of the servers when it joined; 0 where they keep no checkpoints.
    epoch: u64,
}

impl AsyncMember {
    /// Joins every server; with replication one of the two that hold each shard suffices. Waits for servers that do not
    /// answer yet, up to `config.connect_timeout`.
    /// `config` names the tensors that trainers train themselves, if checkpoints are to hold them.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub async fn join(config: SessionConfig) -> Result<Self, ClientError> {
        let (mut attendance, mut epoch) = (Attendance::default(), 0);
        let config = &config;
        for shard in 0..config.servers.len() as u32 {
            let (server, channel, reply) =
                persist_any(
                    config,
                    shard,
                    |_| false,
                    |server| async move {
                        enter(config, server, None).await.map(|(channel, reply)| (server, channel, reply))
                    },
                )
                .await?;
            epoch = reply.epoch.max(epoch);
            attendance.attend(config, server, channel);
        }
        // Servers that are away are joined when they are back.
        (0..config.servers.len() as u32).for_each(|server| attendance.attend_lazily(config, server));
        let config = config.clone();
        Ok(Self { config, attendance, epoch })
    }

    /// Returns the configuration, for this trainer's [`AsyncTables`](super::AsyncTables).
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// Sets what the next heartbeats report: steps done and examples read so far, metrics, and of a trainer that measures it
    /// where its time has gone, and how much of that in waiting for servers and other trainers.
    pub fn report(
        &self,
        step: u64,
        examples: u64,
        metrics: &BTreeMap<String, f64>,
        spent: Option<(TimeSpent, Duration)>,
    ) {
        let (spent, waiting) = spent.unzip();
        let (metrics, waiting) = (metrics.clone(), waiting.unwrap_or_default());
        self.attendance.report(Report { step, examples, metrics, waiting, spent, ..Report::default() });
    }

    /// See [`AsyncSession::recorder`](super::AsyncSession::recorder).
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.attendance.recorder()
    }

    /// Returns the trainers that have finished, as far as server 0 knows; none if it does not answer soon.
    pub async fn finished(&self) -> Vec<u32> {
        let Some(mut client) = self.attendance.client(0) else { return Vec::new() };
        let Ok(Ok(reply)) = tokio::time::timeout(ANSWER, client.status(proto::StatusRequest {})).await else {
            return Vec::new();
        };
        let finished = |trainer: &proto::TrainerStatus| trainer.state() == proto::TrainerState::Finished;
        reply.into_inner().trainers.iter().filter(|trainer| finished(trainer)).map(|trainer| trainer.index).collect()
    }

    /// Leaves every server, saying what [`AsyncMember::report`] said last: `finished` says that the work is
    /// done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub async fn leave(self, finished: bool) -> Result<(), ClientError> {
        let Self { config, attendance, epoch } = self;
        attendance.leave(&config, finished, false, epoch).await
    }

    /// Leaves every server with an error of this trainer's own, see [`AsyncSession::fail`](super::AsyncSession::fail).
    pub async fn fail(self, failure: String) {
        let Self { config, attendance, .. } = self;
        attendance.fail(&config, failure).await;
    }
}

/// A member for a training loop, which blocks.
pub struct Member {
    // Dropped before the runtime that its tasks run on.
    member: AsyncMember,
    runtime: Runtime,
}

impl Member {
    /// See [`AsyncMember::join`].
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig) -> Result<Self, ClientError> {
        let runtime = network(1)?;
        let member = runtime.block_on(AsyncMember::join(config))?;
        Ok(Self { member, runtime })
    }

    /// Returns the configuration, for this trainer's [`Tables`](super::Tables).
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.member.config()
    }

    /// See [`AsyncMember::report`].
    pub fn report(
        &self,
        step: u64,
        examples: u64,
        metrics: &BTreeMap<String, f64>,
        spent: Option<(TimeSpent, Duration)>,
    ) {
        self.member.report(step, examples, metrics, spent);
    }

    /// See [`AsyncMember::recorder`].
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.member.recorder()
    }

    /// See [`AsyncMember::finished`].
    #[must_use]
    pub fn finished(&self) -> Vec<u32> {
        self.runtime.block_on(self.member.finished())
    }

    /// See [`AsyncMember::leave`].
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub fn leave(self, finished: bool) -> Result<(), ClientError> {
        let Self { member, runtime } = self;
        runtime.block_on(member.leave(finished))
    }

    /// See [`AsyncMember::fail`].
    pub fn fail(self, failure: String) {
        let Self { member, runtime } = self;
        runtime.block_on(member.fail(failure));
    }
}
