//! Exchanges the blocks of one step: sends gradients, takes answers.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Status};

use super::{AsyncSession, INTERRUPTIBLE, LAST_STEP, Settled};
use crate::client::ClientError;
use crate::client::coder::Coder;
use crate::client::connecting::unreachable;
use crate::client::lane::Event;
use crate::codec::Codec;
use crate::proto;
use crate::retry::{Retries, Schedule};

impl AsyncSession {
    /// Sends what the window of `server` lets through. All trainers send their blocks in one order, whatever the number
    /// of their connections, so that a round never waits for a block that somebody holds back.
    pub(super) fn send(&mut self, step: u64, server: usize) {
        let link = &self.links[server];
        // Where a server passes gradients on to another one, they travel in any case.
        let travels = !link.shares_memory || self.config.replication_factor > 1;
        let window = if travels { link.window } else { usize::MAX };
        while let Some(block) = self.queues[server].next(window) {
            let version = self.versions[block as usize];
            let message = if link.shares_memory {
                Coder::notice(step, block, version)
            } else {
                self.coder.message(step, block, version, &self.memory.gradients()[self.layout.range(block)])
            };
            link.lane(self.layout.lane(block, link.width)).send(message);
        }
    }

    /// Takes answers until no block is owed; makes broken streams anew and sends again what they owe.
    pub(super) async fn settle(&mut self, step: u64) -> Result<Settled, ClientError> {
        let mut owed = self.owed.len();
        while owed > 0 {
            match self.next_event().await? {
                Event::Block(name, block) if block.step == step && self.take(&block) => {
                    owed -= 1;
                    self.queues[name.server as usize].answered(block.block);
                    self.send(step, name.server as usize);
                }
                Event::Block(..) => {} // A second answer to a gradient that was sent again.
                Event::Broken(_, status) if is_late(&status) => return Ok(Settled::Rewound),
                Event::Broken(name, status) => {
                    if let Settled::Rewound = self.reopen(name.server, name.lane, &status).await? {
                        return Ok(Settled::Rewound);
                    }
                    let server = name.server as usize;
                    let Self { links, layout, generation, .. } = self;
                    let link = &links[server];
                    self.queues[server].lost(|block| link.has(layout.lane(block, link.width), *generation));
                    self.send(step, server);
                }
            }
        }
        Ok(Settled::Done)
    }

    /// Waits until the last step outlives every server: this trainer will not be there to send it again.
    pub(super) async fn conclude(&mut self) -> Result<Settled, ClientError> {
        let (begun, limit) = (Instant::now(), self.config.connect_timeout);
        // Without a pause: opening the stream again pauses.
        let mut retries = Retries::new(Schedule::every(Duration::ZERO).within(limit));
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let status = match tokio::time::timeout(left, self.links[0].conclude(&self.config)).await {
                Ok(Ok(())) => break,
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("not all servers could keep the last step"),
            };
            if self.config.interrupted() {
                return Err(ClientError::Interrupted);
            }
            if !retries.pause().await {
                return Err(unreachable(&self.config, 0, status.message()));
            }
            if let Settled::Rewound = self.reopen(0, 0, &status).await? {
                return Ok(Settled::Rewound);
            }
        }
        self.concluded = true;
        Ok(Settled::Done)
    }

    /// Returns the next event of a stream that is open. Events of an older stream are dropped: their state may be gone.
    pub(super) async fn next_event(&mut self) -> Result<Event, ClientError> {
        loop {
            let event = self.any_event().await?;
            let (Event::Block(name, _) | Event::Broken(name, _)) = &event;
            if self.links[name.server as usize].has(name.lane, name.generation) {
                return Ok(event);
            }
        }
    }

    async fn any_event(&mut self) -> Result<Event, ClientError> {
        loop {
            // Mostly there is one, and no timer is needed.
            if let Ok(event) = self.events.try_recv() {
                return Ok(event);
            }
            match tokio::time::timeout(INTERRUPTIBLE, self.events.recv()).await {
                Ok(event) => return Ok(event.expect("the session holds a sender")),
                Err(_) if self.config.interrupted() => {
                    // Who leaves an elastic job lets others read again what it has not seen the end of.
                    let since = self.interrupted.get_or_insert_with(Instant::now).elapsed();
                    if !self.config.elastic || since >= LAST_STEP {
                        return Err(ClientError::Interrupted);
                    }
                }
                Err(_) => {} // Nothing yet.
            }
        }
    }

    /// Takes a block's values; false if they were not owed.
    pub(super) fn take(&mut self, block: &proto::ParameterBlock) -> bool {
        let number = block.block as usize;
        let range = self.layout.range(block.block);
        if range.is_empty() || !self.owed[number] {
            return false;
        }
        let shared = block.payload.is_empty() && self.links[self.layout.owner(block.block) as usize].shares_memory;
        let taken = shared
            || Codec::from_number(block.codec)
                .is_some_and(|codec| codec.decode(&block.payload, &mut self.memory.parameters_mut()[range]).is_ok());
        if taken {
            self.owed[number] = false;
            self.versions[number] = block.version;
            self.coder.answered(block.block);
        }
        taken
    }
}

/// Returns whether a stream ended because the others went on without this trainer.
fn is_late(status: &Status) -> bool {
    status.code() == Code::OutOfRange
}
