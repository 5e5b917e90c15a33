//! One trainer's session with all servers of its job.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::Status;

use super::link::{Event, Link};
use super::{ClientError, SessionConfig, is_retryable};
use crate::layout::Layout;
use crate::proto;
use crate::shm::Mapping;

/// How often a trainer says that it lives.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a server may take to note that a trainer leaves.
pub(super) const LEAVE: Duration = Duration::from_secs(10);

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct Session {
    config: SessionConfig,
    layout: Layout,
    links: Vec<Link>,
    memory: Mapping,
    /// Blocks of the step in flight that were not answered yet.
    owed: Vec<bool>,
    next_step: u64,
    waiting: Duration,
    report: Arc<Mutex<Report>>,
    heartbeats: Vec<JoinHandle<()>>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    generation: u64,
    runtime: Runtime,
}

#[derive(Clone, Debug, Default)]
struct Report {
    examples: u64,
    metrics: BTreeMap<String, f64>,
}

impl Session {
    /// Joins every server, gives `initial` to blocks that have no values, and pulls the current ones.
    /// Waits for servers that do not answer yet, up to `config.connect_timeout`.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig, initial: &[f32]) -> Result<Self, ClientError> {
        let layout = Layout::new(&config.tensors, config.servers.len())?;
        if initial.len() != layout.elements() {
            return Err(ClientError::InitialValues { tensors: layout.elements(), values: initial.len() });
        }
        let mut memory =
            Mapping::new(initial.len()).map_err(|source| ClientError::Memory { elements: initial.len(), source })?;
        memory.parameters_mut().copy_from_slice(initial);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("psjobs-net")
            .enable_all()
            .build()
            .map_err(ClientError::Runtime)?;
        let (sender, events) = mpsc::channel();
        let mut session = Self {
            links: Vec::new(),
            memory,
            owed: vec![false; layout.blocks() as usize],
            next_step: 0,
            waiting: Duration::ZERO,
            report: Arc::default(),
            heartbeats: Vec::new(),
            events,
            sender,
            generation: 0,
            runtime,
            layout,
            config,
        };
        for server in 0..session.config.servers.len() as u32 {
            let link = session.open(server)?;
            session.links.push(link);
            let heartbeat = session.beat(server);
            session.heartbeats.push(heartbeat);
        }
        // Every server has at least one block of most models; one that has none says u64::MAX.
        session.next_step = session.links.iter().map(|link| link.next_step).min().unwrap_or(0);
        session.pull()?;
        Ok(session)
    }

    /// The first step that the servers do not have from this trainer; above 0 after a restart.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// All parameters, flat, as of the last exchange.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        self.memory.parameters()
    }

    /// All gradients, flat, to be filled before [`Session::exchange`].
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        self.memory.gradients_mut()
    }

    /// Time spent in [`Session::exchange`] so far: waiting for servers, other trainers and the network.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Sends the gradients of `step`, back blocks first, and returns when the parameters of every
    /// block have come back. A lost server is waited for, up to `connect_timeout`.
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient.
    pub fn exchange(&mut self, step: u64) -> Result<(), ClientError> {
        let start = Instant::now();
        self.owed.fill(true);
        for block in (0..self.layout.blocks()).rev() {
            self.send(step, block);
        }
        let outcome = self.settle(step);
        self.waiting += start.elapsed();
        outcome
    }

    /// What the next heartbeats say: examples read by this process so far, and metrics.
    pub fn report(&self, examples: u64, metrics: &BTreeMap<String, f64>) {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        *report = Report { examples, metrics: metrics.clone() };
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have been told all the same.
    pub fn leave(mut self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        self.heartbeats.drain(..).for_each(|heartbeat| heartbeat.abort());
        let request = proto::LeaveRequest {
            trainer: Some(self.config.id()),
            finished,
            examples,
            metrics: metrics.into_iter().collect(),
        };
        let mut outcome = Ok(());
        // Server 0 last: it speaks for the job, and should not be done before the others.
        for server in (0..self.links.len()).rev() {
            let mut client = self.links[server].coordination();
            let request = request.clone();
            let told = self.runtime.block_on(async { tokio::time::timeout(LEAVE, client.leave(request)).await });
            let reason = match told {
                Ok(Ok(_)) => continue,
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => "no answer".to_owned(),
            };
            let (address, seconds) = (self.config.servers[server].clone(), LEAVE.as_secs());
            outcome = Err(ClientError::Unreachable { address, seconds, reason });
        }
        outcome
    }

    fn send(&self, step: u64, block: u32) {
        let link = &self.links[self.layout.owner(block) as usize];
        link.gradient(step, block, &self.memory.gradients()[self.layout.range(block)]);
    }

    /// Takes answers until no block is owed; makes broken links anew and sends again what they owe.
    fn settle(&mut self, step: u64) -> Result<(), ClientError> {
        let mut owed = self.owed.len();
        while owed > 0 {
            match self.events.recv().expect("the session holds a sender") {
                Event::Block(block) if block.step == step && self.take(&block) => owed -= 1,
                Event::Block(_) => {} // A second answer to a gradient that was sent again.
                Event::Broken { server, generation, status } => {
                    if self.links[server as usize].generation != generation {
                        continue;
                    }
                    self.reopen(server, &status)?;
                    let unanswered: Vec<u32> =
                        self.layout.owned_by(server).rev().filter(|block| self.owed[*block as usize]).collect();
                    unanswered.into_iter().for_each(|block| self.send(step, block));
                }
            }
        }
        Ok(())
    }

    /// Takes a block's values; false if they were not owed.
    fn take(&mut self, block: &proto::ParameterBlock) -> bool {
        let range = self.layout.range(block.block);
        let shared = block.payload.is_empty() && self.links[self.layout.owner(block.block) as usize].shares_memory;
        if range.is_empty() || !(shared || block.payload.len() == range.len() * 4) || !self.owed[block.block as usize] {
            return false;
        }
        self.owed[block.block as usize] = false;
        if !shared {
            copy(&mut self.memory.parameters_mut()[range], &block.payload);
        }
        true
    }

    fn open(&mut self, server: u32) -> Result<Link, ClientError> {
        self.generation += 1;
        let (config, layout) = (&self.config, &self.layout);
        self.runtime.block_on(Link::open(config, layout, server, self.generation, &self.memory, &self.sender))
    }

    fn reopen(&mut self, server: u32, status: &Status) -> Result<(), ClientError> {
        let address = self.config.servers[server as usize].clone();
        if !is_retryable(status) {
            return Err(ClientError::Refused { address, reason: status.message().to_owned() });
        }
        tracing::warn!(%address, reason = status.message(), "lost server {server}; connecting again");
        self.links[server as usize] = self.open(server)?;
        let heartbeat = self.beat(server);
        std::mem::replace(&mut self.heartbeats[server as usize], heartbeat).abort();
        tracing::info!(%address, "server {server} is back");
        Ok(())
    }

    fn pull(&mut self) -> Result<(), ClientError> {
        for server in 0..self.links.len() as u32 {
            let blocks = loop {
                match self.runtime.block_on(self.links[server as usize].pull(&self.config)) {
                    Ok(blocks) => break blocks,
                    Err(status) => self.reopen(server, &status)?,
                }
            };
            for block in blocks {
                self.owed[block.block as usize] = true;
                self.take(&block);
            }
        }
        self.owed.fill(false);
        Ok(())
    }

    fn beat(&self, server: u32) -> JoinHandle<()> {
        let mut client = self.links[server as usize].coordination();
        let (report, id) = (self.report.clone(), self.config.id());
        self.runtime.spawn(async move {
            let mut ticks = tokio::time::interval(HEARTBEAT);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Report { examples, metrics } = report.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let request = proto::HeartbeatRequest { trainer: Some(id.clone()), examples, metrics, step: 0 };
                // A failed heartbeat shows as a broken stream too, and that is dealt with there.
                if let Err(status) = client.heartbeat(request).await {
                    tracing::debug!(reason = status.message(), "heartbeat failed");
                }
            }
        })
    }
}

fn copy(values: &mut [f32], payload: &[u8]) {
    for (value, bytes) in values.iter_mut().zip(payload.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}
