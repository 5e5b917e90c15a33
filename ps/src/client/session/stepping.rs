//! Exchanges the blocks of one step: sends gradients, takes answers.

use std::sync::atomic::Ordering;

use psjobs_arithmetic::codec::Codec;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::{AsyncSession, INTERRUPTIBLE, LAST_STEP, Settled};
use crate::client::coder::Coder;
use crate::client::connecting::{Failure, is_not_kept, schedule, unreachable, wait_until_durable};
use crate::client::error::{ClientError, is_retryable};
use crate::client::exchange::{Outgoing, Purpose, Ready};
use crate::client::lane::Event;
use crate::client::link::Link;
use crate::proto::{self, exchange_request::Message};
use crate::retry::Retries;
use crate::wire::{codec_number, frame};

impl AsyncSession {
    /// Exchanges `purpose` of `step` with all blocks: sends what the windows let through, takes answers until every block
    /// has answered, and opens broken streams again.
    pub(super) async fn settle(&mut self, purpose: Purpose, step: u64) -> Result<Settled, ClientError> {
        self.begin(purpose, step);
        let settled = self.take_answers().await;
        self.withdraw();
        settled
    }

    async fn take_answers(&mut self) -> Result<Settled, ClientError> {
        self.send_all();
        while !self.exchange.is_settled() {
            let event = self.next_event().await?;
            if let Settled::Rewound = self.handle(event).await? {
                return Ok(Settled::Rewound);
            }
        }
        Ok(Settled::Done)
    }

    /// Exchanges the gradients of `step` while they are being computed: sends those that are `ready`. Returns also when
    /// the last one was, from which on the trainer waits.
    pub(super) async fn settle_gradually(
        &mut self,
        step: u64,
        ready: &mut watch::Receiver<Ready>,
    ) -> Result<(Settled, Instant), ClientError> {
        self.begin(Purpose::Step, step);
        let settled = self.take_answers_gradually(ready).await;
        self.withdraw();
        settled
    }

    async fn take_answers_gradually(
        &mut self,
        ready: &mut watch::Receiver<Ready>,
    ) -> Result<(Settled, Instant), ClientError> {
        let mut complete = None;
        loop {
            if complete.is_none() {
                let Ready::From(first) = *ready.borrow_and_update() else { return Err(ClientError::Interrupted) };
                self.exchange.set_ready(first);
                self.send_all();
                complete = (first == 0).then(Instant::now);
            }
            if let Some(since) = complete.filter(|_| self.exchange.is_settled()) {
                return Ok((Settled::Done, since));
            }
            let event = tokio::select! {
                event = self.next_event() => event?,
                changed = ready.changed(), if complete.is_none() => match changed {
                    Ok(()) => continue,
                    // The trainer's end of the step is gone.
                    Err(_) => return Err(ClientError::Interrupted),
                },
            };
            if let Settled::Rewound = self.handle(event).await? {
                // The gradients that are still computed belong to a step that is done again.
                return Ok((Settled::Rewound, Instant::now()));
            }
        }
    }

    /// Begins an exchange. Answers of one that was given up, which nothing has looked at, do not count for it: each of its
    /// blocks is answered again.
    fn begin(&mut self, purpose: Purpose, step: u64) {
        let left = std::iter::from_fn(|| self.events.try_recv().ok());
        let ends: Vec<Event> = left.filter(|event| matches!(event, Event::Broken(..))).collect();
        for end in ends {
            // The session holds the receiver.
            drop(self.sender.send(end));
        }
        self.exchange.begin(purpose, step);
    }

    /// Lets no answer land any more: the exchange is over, and the trainer computes with the parameters, or all are pulled.
    fn withdraw(&self) {
        self.links.iter().for_each(Link::withdraw);
    }

    /// Carries out what an event means, and sends what may leave after it.
    async fn handle(&mut self, event: Event) -> Result<Settled, ClientError> {
        let server = match event {
            Event::Block(name, block) => {
                if self.exchange.receive(name, block.block, block.step) {
                    self.take(&block)?;
                }
                name.server
            }
            Event::Landed(name, block) => {
                if self.exchange.receive(name, block.block, block.step) {
                    self.has_taken(&block);
                }
                name.server
            }
            Event::Broken(_, status) if is_late(&status) => return Ok(Settled::Rewound),
            Event::Broken(name, status) => {
                if let Settled::Rewound = self.reopen(name.server, name.lane, &status).await? {
                    return Ok(Settled::Rewound);
                }
                name.server
            }
        };
        self.send(server);
        Ok(Settled::Done)
    }

    fn send_all(&mut self) {
        (0..self.links.len() as u32).for_each(|server| self.send(server));
    }

    /// Sends what leaves for a server now.
    fn send(&mut self, server: u32) {
        let link = &self.links[server as usize];
        let (purpose, step) = self.exchange.subject();
        while let Some(Outgoing { block, lane }) = self.exchange.next_to_send(server) {
            let version = self.exchange.version(block);
            if let Some(momentum) = self.momentum.as_mut().filter(|_| purpose == Purpose::Step) {
                let (gradients, parameters) = self.memory.gradients_and_parameters();
                momentum.add(step, block, self.layout.range(block), gradients, parameters);
            }
            let message = match purpose {
                Purpose::Entry => {
                    let message = Some(Message::JoinRound(proto::JoinRound { block, step }));
                    frame::message(&proto::ExchangeRequest { message })
                }
                Purpose::Step if link.shares_memory() => Coder::notice(step, block, version),
                Purpose::Step => {
                    self.coder.message(step, block, version, &self.memory.gradients()[self.layout.range(block)])
                }
            };
            let lane = link.lane(lane);
            if !link.shares_memory() {
                lane.await_answer(block, step, self.layout.range(block));
            }
            lane.send(message);
        }
    }

    /// Waits until the last step outlives every server: this trainer will not be there to send it again.
    pub(super) async fn conclude(&mut self) -> Result<Settled, ClientError> {
        self.config.connect_timeout = self.config.waiting_time_at_end(self.links[0].epoch);
        // The answer itself has no deadline: it comes with the next checkpoint, whose parts may take minutes.
        let schedule = schedule(&self.config, 0).failing_for(self.config.connect_timeout);
        let mut retries = Retries::new(schedule);
        loop {
            let Link { host, epoch, .. } = self.links[0];
            let concluding = async {
                // If the other holder of its blocks leads them, server 0 still writes the checkpoints, where there are any.
                if host == 0 || epoch == 0 {
                    Ok(self.links[0].conclude(&self.config).await?)
                } else {
                    wait_until_durable(&self.config, epoch, self.config.given_steps()).await
                }
            };
            let status = match concluding.await {
                Ok(()) => break,
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Status(status)) => status,
            };
            if self.config.interrupted() {
                return Err(ClientError::Interrupted);
            }
            // Server 0 is there, and will keep the step when it can: who starts the trainer again cannot help.
            if self.config.supervised && is_not_kept(&status) {
                retries = Retries::new(schedule);
            }
            if !retries.pause().await {
                return Err(unreachable(&self.config, 0, self.config.connect_timeout, status.message()));
            }
            // Server 0 is away; the stream to the leader is well. One that says that the job goes on without this trainer is not.
            if host != 0 && !matches!(status.code(), Code::Aborted | Code::OutOfRange) && is_retryable(&status) {
                continue;
            }
            if let Settled::Rewound = self.reopen(0, 0, &status).await? {
                return Ok(Settled::Rewound);
            }
        }
        self.concluded = true;
        self.config.concluded.store(true, Ordering::Relaxed);
        Ok(Settled::Done)
    }

    /// Returns the next event of a stream that is open. Events of an older stream are dropped: their state may be gone.
    pub(super) async fn next_event(&mut self) -> Result<Event, ClientError> {
        loop {
            let event = self.any_event().await?;
            let (Event::Block(name, _) | Event::Landed(name, _) | Event::Broken(name, _)) = &event;
            if self.exchange.is_open(*name) {
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
                // Nothing yet.
                Err(_) => {
                    if let Some(broken) = self.find_silent() {
                        return Ok(broken);
                    }
                }
            }
        }
    }

    /// Returns the end of a stream to a server that has answered no heartbeat for so long that the other holder of its
    /// blocks may lead them. Its connection shows that later.
    fn find_silent(&self) -> Option<Event> {
        let replicated = self.config.replication_factor > 1;
        let silent = |link: &&Link| replicated && self.config.last_heard.is_silent(link.host);
        let (server, _) = (0..).zip(&self.links).find(|(_, link)| silent(link))?;
        let status = Status::unavailable("it answers no heartbeats");
        Some(Event::Broken(self.exchange.any_stream(server)?, status))
    }

    /// Puts the values of a block in place.
    ///
    /// # Errors
    /// If they are not those of one of the model's blocks.
    pub(super) fn take(&mut self, block: &proto::ParameterBlock) -> Result<(), ClientError> {
        let range = self.layout.range(block.block);
        let owner = self.layout.owner(block.block) as usize;
        let shared = block.payload.is_empty() && self.links[owner].shares_memory();
        let values = &mut self.memory.parameters_mut()[range.clone()];
        let decode = |codec: Codec| codec.decode(&block.payload, values).is_ok();
        if range.is_empty() || !(shared || codec_number::from_number(block.codec).is_some_and(decode)) {
            let (address, number) = (self.config.servers[owner].clone(), block.block);
            let reason = format!("it sent values for block {number} that this model does not have");
            return Err(ClientError::Refused { address, reason });
        }
        self.has_taken(block);
        Ok(())
    }

    /// Records that the parameters contain the values of an answer.
    fn has_taken(&mut self, block: &proto::ParameterBlock) {
        self.exchange.holds(block.block, block.version);
        self.coder.answered(block.block);
    }
}

/// Returns whether a stream ended because the others went on without this trainer.
fn is_late(status: &Status) -> bool {
    status.code() == Code::OutOfRange
}
