//! One trainer's session with all servers of its job. It needs a runtime of tokio, and takes time from it alone.

mod elastic;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use self::elastic::{Hand, is_late};
use super::attendance::{Attendance, Report};
use super::coder::Coder;
use super::link::{Event, Link, Opening};
use super::{ClientError, SessionConfig, is_retryable};
use crate::batch::sharing::{Share, Work};
use crate::codec::Codec;
use crate::layout::Layout;
use crate::proto;
use crate::shm::Mapping;
use crate::wire::Buffers;

/// How soon an interrupt is seen by a trainer that waits.
const INTERRUPTIBLE: Duration = Duration::from_millis(100);

/// How long a trainer of an elastic job that is told to stop waits for the others to end the step that it has given to.
const LAST_STEP: Duration = Duration::from_secs(5);

/// How long server 0 may take to tell a trainer's share of the examples.
const SHARE: Duration = Duration::from_secs(2);

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct AsyncSession {
    config: SessionConfig,
    layout: Layout,
    links: Vec<Link>,
    memory: Mapping,
    /// What blocks begin with, in jobs that may go back to their beginning: with checkpoints, before the first.
    initial: Vec<f32>,
    coder: Coder,
    buffers: Buffers,
    /// Updates of each block that the parameters contain.
    versions: Vec<u64>,
    /// Blocks of the step in flight that were not answered yet.
    owed: Vec<bool>,
    /// By server: blocks of the step that are still to be sent, and those sent and not answered.
    to_send: Vec<VecDeque<u32>>,
    in_flight: Vec<usize>,
    next_step: u64,
    /// The servers need this trainer no more.
    concluded: bool,
    /// What it was dealt, in an elastic job.
    hand: Hand,
    waiting: Duration,
    /// When it was seen that this trainer is to stop.
    interrupted: Option<Instant>,
    attendance: Attendance,
    events: mpsc::UnboundedReceiver<Event>,
    sender: mpsc::UnboundedSender<Event>,
    generation: u64,
}

/// How a step, or a pull, ended.
enum Settled {
    /// Every block has come.
    Done,
    /// The servers have gone back to a checkpoint, or on without this trainer.
    Rewound,
}

impl AsyncSession {
    /// Joins every server, gives `initial` to blocks that have no values, and pulls the current ones.
    /// Waits for servers that do not answer yet, up to `config.connect_timeout`.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub async fn join(config: SessionConfig, initial: &[f32]) -> Result<Self, ClientError> {
        let layout = Layout::new(&config.tensors, config.servers.len())?;
        if initial.len() != layout.elements() {
            return Err(ClientError::InitialValues { tensors: layout.elements(), values: initial.len() });
        }
        let mut memory =
            Mapping::new(initial.len()).map_err(|source| ClientError::Memory { elements: initial.len(), source })?;
        memory.parameters_mut().copy_from_slice(initial);
        // Not more than one answer for each block, and its end, of a link.
        let (sender, events) = mpsc::unbounded_channel();
        let (blocks, servers, buffers) = (layout.blocks() as usize, config.servers.len(), Buffers::default());
        let mut session = Self {
            links: Vec::new(),
            memory,
            initial: initial.to_vec(),
            coder: Coder::new(&config.compression, buffers.clone()),
            buffers,
            versions: vec![0; blocks],
            owed: vec![false; blocks],
            to_send: vec![VecDeque::new(); servers],
            in_flight: vec![0; servers],
            next_step: 0,
            concluded: false,
            hand: Hand::default(),
            waiting: Duration::ZERO,
            interrupted: None,
            attendance: Attendance::default(),
            events,
            sender,
            generation: 0,
            layout,
            config,
        };
        session.enter().await?;
        if session.links.iter().all(|link| link.epoch == 0) {
            session.initial = Vec::new();
        }
        Ok(session)
    }

    /// The first step that the servers do not have from this trainer; above 0 after a restart. In an elastic job the
    /// one that the others are at.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// All parameters, flat, as of the last exchange.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        self.memory.parameters()
    }

    /// All gradients, flat, to be filled before [`AsyncSession::exchange`].
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        self.memory.gradients_mut()
    }

    /// Time spent in [`AsyncSession::exchange`] so far: waiting for servers, other trainers and the network.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Sends the gradients of `step`, back blocks first, and returns the next step to do when the
    /// parameters of every block have come back. That is `step + 1`, or an earlier one if the servers
    /// had to go back to a checkpoint. A lost server is waited for, up to `connect_timeout`.
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient, or the wait is interrupted; the last words can be
    /// said all the same.
    pub async fn exchange(&mut self, step: u64) -> Result<u64, ClientError> {
        let start = Instant::now();
        self.owed.fill(true);
        for server in 0..self.links.len() {
            self.to_send[server] = self.layout.owned_by(server as u32).rev().collect();
            self.in_flight[server] = 0;
            self.send(step, server);
        }
        let settled = match self.settle(step).await? {
            Settled::Done if step + 1 == self.config.total_steps && !self.config.elastic => self.conclude().await?,
            settled => settled,
        };
        match settled {
            Settled::Done => {
                self.next_step = step + 1;
                self.hand.did_one();
            }
            Settled::Rewound => self.enter_anew().await?,
        }
        self.waiting += start.elapsed();
        Ok(self.next_step)
    }

    /// This trainer's share of the examples of `step` and some that follow, in a job where that follows its speed:
    /// it would read `base` of them otherwise, and has done `work` so far. `None` if server 0 does not answer
    /// now.
    ///
    /// # Errors
    /// If the job has another base, or fixed shares.
    pub async fn share_batch(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        let Some(mut client) = self.attendance.client(0) else { return Ok(None) };
        let (trainer, busy_seconds) = (Some(self.config.id()), work.busy.as_secs_f64());
        let request = proto::ShareBatchRequest { trainer, step, base, examples: work.examples, busy_seconds };
        match tokio::time::timeout(SHARE, client.share_batch(request)).await {
            Ok(Ok(reply)) => {
                let proto::ShareBatchReply { until_step, offset, examples } = reply.into_inner();
                // A share that does not hold for the step would be asked for again and again.
                Ok((until_step > step).then_some(Share { until: until_step, offset, examples }))
            }
            Ok(Err(status)) if !is_retryable(&status) => {
                let address = self.config.servers[0].clone();
                Err(ClientError::Refused { address, reason: status.message().to_owned() })
            }
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }

    /// What the next heartbeats say: examples read by this process so far, and metrics.
    pub fn report(&self, examples: u64, metrics: &BTreeMap<String, f64>) {
        let (waiting, dealt) = (self.waiting, self.hand.told());
        self.attendance.report(Report { step: 0, examples, metrics: metrics.clone(), waiting, dealt });
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have been told all the same.
    pub async fn leave(self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        let Self { config, attendance, waiting, concluded, initial, hand, .. } = self;
        attendance.report(Report { step: 0, examples, metrics, waiting, dealt: hand.told() });
        match attendance.leave(&config, finished, concluded).await {
            Err(error) if finished && concluded && !initial.is_empty() => {
                tracing::warn!(%error, "a server does not hear that this trainer leaves; it will see so in the checkpoint");
                Ok(())
            }
            left => left,
        }
    }

    /// Joins all servers, which must agree on what they hold, and pulls it.
    async fn enter(&mut self) -> Result<(), ClientError> {
        let mut epoch = 0;
        loop {
            self.links.clear();
            for server in 0..self.config.servers.len() as u32 {
                let link = self.open(server, epoch).await?;
                self.links.push(link);
            }
            let newest = self.links.iter().map(|link| link.epoch).max().unwrap_or(0);
            // The others are about to go to the same checkpoint.
            epoch = newest;
            if self.links.iter().any(|link| link.epoch < newest) {
                continue;
            }
            if self.config.elastic {
                match self.take_place().await? {
                    Settled::Done => return Ok(()),
                    Settled::Rewound => continue,
                }
            }
            // Every server has at least one block of most models; one that has none says u64::MAX.
            self.next_step = self.links.iter().map(|link| link.next_step).min().unwrap_or(0);
            if let Settled::Rewound = self.pull().await? {
                continue;
            }
            // A process before this one gave the last step, and may have died before it was kept.
            if self.next_step < self.config.total_steps || matches!(self.conclude().await?, Settled::Done) {
                return Ok(());
            }
        }
    }

    /// Sends what the window of `server` lets through. All trainers send their blocks in one order, so that a round
    /// never waits for a block that somebody holds back.
    fn send(&mut self, step: u64, server: usize) {
        let link = &self.links[server];
        // Where a server passes gradients on to another one, they travel in any case.
        let travels = !link.shares_memory || self.config.replication_factor > 1;
        while (!travels || self.in_flight[server] < link.window)
            && let Some(block) = self.to_send[server].pop_front()
        {
            let version = self.versions[block as usize];
            let message = if link.shares_memory {
                Coder::notice(step, block, version)
            } else {
                self.coder.message(step, block, version, &self.memory.gradients()[self.layout.range(block)])
            };
            self.in_flight[server] += 1;
            link.send(message);
        }
    }

    /// Takes answers until no block is owed; makes broken links anew and sends again what they owe.
    async fn settle(&mut self, step: u64) -> Result<Settled, ClientError> {
        let mut owed = self.owed.len();
        while owed > 0 {
            match self.next_event().await? {
                // What an older stream still says is of a state that may be gone.
                Event::Block { server, generation, block }
                    if self.links[server as usize].generation == generation
                        && block.step == step
                        && self.take(&block) =>
                {
                    owed -= 1;
                    let server = server as usize;
                    self.in_flight[server] = self.in_flight[server].saturating_sub(1);
                    self.send(step, server);
                }
                Event::Block { .. } => {} // A second answer to a gradient that was sent again.
                Event::Broken { server, generation, status } => {
                    if self.links[server as usize].generation != generation {
                        continue;
                    }
                    if is_late(&status) {
                        return Ok(Settled::Rewound);
                    }
                    if let Settled::Rewound = self.reopen(server, &status).await? {
                        return Ok(Settled::Rewound);
                    }
                    let unanswered = self.layout.owned_by(server).rev().filter(|block| self.owed[*block as usize]);
                    self.to_send[server as usize] = unanswered.collect();
                    self.in_flight[server as usize] = 0;
                    self.send(step, server as usize);
                }
            }
        }
        Ok(Settled::Done)
    }

    /// Sees to it that the last step outlives every server: this trainer will not be there to give it again.
    async fn conclude(&mut self) -> Result<Settled, ClientError> {
        let (begun, patience) = (Instant::now(), self.config.connect_timeout);
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            let status = match tokio::time::timeout(left, self.links[0].conclude(&self.config)).await {
                Ok(Ok(())) => break,
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("not all servers could keep the last step"),
            };
            if self.config.interrupted() {
                return Err(ClientError::Interrupted);
            }
            if begun.elapsed() >= patience {
                let (address, reason) = (self.config.servers[0].clone(), status.message().to_owned());
                return Err(ClientError::Unreachable { address, seconds: patience.as_secs(), reason });
            }
            if let Settled::Rewound = self.reopen(0, &status).await? {
                return Ok(Settled::Rewound);
            }
        }
        self.concluded = true;
        Ok(Settled::Done)
    }

    async fn next_event(&mut self) -> Result<Event, ClientError> {
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
    fn take(&mut self, block: &proto::ParameterBlock) -> bool {
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

    async fn open(&mut self, server: u32, epoch: u64) -> Result<Link, ClientError> {
        self.generation += 1;
        let opening = Opening {
            config: &self.config,
            layout: &self.layout,
            server,
            generation: self.generation,
            epoch,
            memory: &self.memory,
            initial: &self.initial,
            buffers: &self.buffers,
            events: &self.sender,
        };
        let link = Link::open(&opening).await?;
        self.attendance.attend(&self.config, link.host, link.channel());
        // Another holder of the blocks leads nothing now, and may again: it has to know of this trainer, too.
        for holder in self.config.holders(server).into_iter().filter(|holder| *holder != link.host) {
            self.attendance.attend_lazily(&self.config, holder);
        }
        Ok(link)
    }

    async fn reopen(&mut self, server: u32, status: &Status) -> Result<Settled, ClientError> {
        let address = self.config.servers[server as usize].clone();
        if !is_retryable(status) {
            return Err(ClientError::Refused { address, reason: status.message().to_owned() });
        }
        tracing::warn!(%address, reason = status.message(), "lost server {server}; connecting again");
        let epoch = self.links[server as usize].epoch;
        let link = self.open(server, epoch).await?;
        tracing::info!(%address, "server {server} is back");
        let rewound = link.epoch > epoch;
        self.links[server as usize] = link;
        Ok(if rewound { Settled::Rewound } else { Settled::Done })
    }

    async fn pull(&mut self) -> Result<Settled, ClientError> {
        for server in 0..self.links.len() as u32 {
            let blocks = loop {
                match self.links[server as usize].pull(&self.config, server, &self.buffers).await {
                    Ok(blocks) => break blocks,
                    Err(status) => {
                        if let Settled::Rewound = self.reopen(server, &status).await? {
                            return Ok(Settled::Rewound);
                        }
                    }
                }
            };
            for block in blocks {
                if let Some(owed) = self.owed.get_mut(block.block as usize) {
                    *owed = true;
                    self.take(&block);
                }
            }
        }
        self.owed.fill(false);
        Ok(Settled::Done)
    }
}
