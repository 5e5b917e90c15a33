//! The additional steps of a trainer of an elastic job: it takes its place among the others, and asks what to read.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Status};

use super::assigned_batches::AssignedBatches;
use super::{AsyncSession, Settled};
use crate::client::connecting::unreachable;
use crate::client::error::ClientError;
use crate::client::exchange::Purpose;
use crate::proto;
use crate::retry::{Retries, Schedule};

/// How long server 0 may take to answer a question, which it holds back for a second.
const ANSWER: Duration = Duration::from_secs(5);
/// Pause before server 0 is asked again that has not answered.
const PAUSE: Duration = Duration::from_millis(200);
/// The furthest that a trainer enters ahead of the others, in steps.
const FURTHEST: u64 = 64;

impl AsyncSession {
    /// Counts the times that this trainer has taken its place among the servers: when it joined, and each time that they have
    /// gone back to a checkpoint, or on without it. When that grows, in [`AsyncSession::exchange`] or in
    /// [`AsyncSession::next_batch`], gradients that were computed before do not count, in an elastic job the batches that it was
    /// given before and has not done are others' to read, and the next step is [`AsyncSession::next_step`].
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Takes the batches out that are assigned and not asked for yet, so that they are there while this session exchanges.
    pub(in crate::client) fn take_assigned(&mut self) -> VecDeque<u64> {
        std::mem::take(&mut self.assigned.queue)
    }

    /// Puts those batches back that were taken out, and not read since.
    pub(in crate::client) fn return_assigned(&mut self, batches: VecDeque<u64>) {
        self.assigned.queue = batches;
    }

    /// The next batch to read, of an elastic job: one for each step, in the order in which they are given, whether it
    /// is asked for one by one or ahead. `None` if none is left for now; if nothing that was given is still to be
    /// done, the work is done, and it is time to leave. Waits while there are too few trainers.
    ///
    /// # Errors
    /// If server 0 stays away or refuses, or the wait is interrupted.
    pub async fn next_batch(&mut self) -> Result<Option<u64>, ClientError> {
        if let Some(batch) = self.assigned.queue.pop_front() {
            return Ok(Some(batch));
        }
        let begun = Instant::now();
        let answer = self.ask_for_batches().await;
        self.waiting += begun.elapsed();
        answer
    }

    async fn ask_for_batches(&mut self) -> Result<Option<u64>, ClientError> {
        loop {
            let reply = self.ask_until_answered().await?;
            if reply.count > 0 {
                self.assigned.take(reply.first, reply.count.into());
                return Ok(self.assigned.queue.pop_front());
            }
            if reply.wait {
                continue;
            }
            if self.assigned.done < self.assigned.dealt {
                return Ok(None);
            }
            match self.conclude().await? {
                Settled::Done => return Ok(None),
                Settled::Rewound => self.enter_anew().await?,
            }
        }
    }

    /// Asks server 0 for batches; if it does not answer, opens its stream again and repeats.
    async fn ask_until_answered(&mut self) -> Result<proto::AssignBatchesReply, ClientError> {
        let mut retries = Retries::new(Schedule::every(PAUSE).within(self.config.connect_timeout));
        loop {
            if self.config.interrupted() {
                return Err(ClientError::Interrupted);
            }
            let status = match self.ask().await {
                Ok(reply) => return Ok(reply),
                // Another server may lead the blocks of server 0, and let this trainer in.
                Err(status) if status.code() == Code::OutOfRange => {
                    return Err(ClientError::Over { reason: status.message().to_owned() });
                }
                Err(status) => status,
            };
            if let Settled::Rewound = self.reopen(0, 0, &status).await? {
                self.enter_anew().await?;
            }
            if !retries.pause().await {
                return Err(unreachable(&self.config, 0, self.config.connect_timeout, status.message()));
            }
        }
    }

    async fn ask(&self) -> Result<proto::AssignBatchesReply, Status> {
        let Some(mut client) = self.attendance.client(0) else {
            return Err(Status::unavailable("this trainer has yet to join server 0"));
        };
        let &AssignedBatches { entry, dealt, done, seen, .. } = &self.assigned;
        let (trainer, epoch, batches) = (Some(self.config.id()), self.links[0].epoch, self.config.total_steps);
        let question = proto::AssignBatchesRequest { trainer, epoch, entry, batches, assigned: dealt, done, seen };
        let answer = tokio::time::timeout(ANSWER, client.assign_batches(question)).await;
        Ok(answer.map_err(|_| Status::deadline_exceeded("no answer"))??.into_inner())
    }

    pub(super) async fn enter_anew(&mut self) -> Result<(), ClientError> {
        self.enter().await?;
        self.begin_series();
        let why = "the servers went back to a checkpoint, or went on without this trainer";
        tracing::warn!(step = self.next_step, "{why}; going on from there");
        Ok(())
    }

    /// Agrees with all blocks on the step with which this trainer begins, and gets the values for it. A block that is
    /// past it says so: then a later one is tried, further ahead each time, while the others go on.
    pub(super) async fn take_place(&mut self) -> Result<Settled, ClientError> {
        let mut step = self.links.iter().map(|link| link.next_step).max().unwrap_or(0);
        let mut margin = 0;
        loop {
            if let Settled::Rewound = self.settle(Purpose::Entry, step).await? {
                return Ok(Settled::Rewound);
            }
            let furthest = self.exchange.furthest();
            if furthest == step {
                self.next_step = step;
                self.assigned.begin(self.epoch());
                return Ok(Settled::Done);
            }
            margin = (2 * margin).clamp(1, FURTHEST);
            step = furthest.saturating_add(margin);
        }
    }
}
