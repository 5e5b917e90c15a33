//! One trainer's session with all servers of its job. It needs a runtime of tokio, and takes time from it alone.

mod assigned_batches;
mod elastic;
mod entering;
mod stepping;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::assigned_batches::AssignedBatches;
use super::attendance::{Attendance, Report};
use super::coder::Coder;
use super::config::SessionConfig;
use super::error::ClientError;
use super::exchange::{Exchange, Purpose, Ready};
use super::lane::Event;
use super::link::Link;
use super::momentum::Momentum;
use super::recorder::Recorder;
use super::shares::Shares;
use super::time_spent::TimeSpent;
use crate::batch::sharing::{Share, Work};
use crate::layout::Layout;
use crate::shm::Mapping;
use crate::wire::Buffers;

/// How soon an interrupt is seen by a trainer that waits.
const INTERRUPTIBLE: Duration = Duration::from_millis(100);

/// How long a trainer of an elastic job that must stop waits for the others to end the step that it has given to.
const LAST_STEP: Duration = Duration::from_secs(5);

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct AsyncSession {
    config: SessionConfig,
    /// How long this trainer waits for a server while it has steps to do.
    connect_timeout: Duration,
    layout: Layout,
    links: Vec<Link>,
    memory: Mapping,
    /// Maps `memory` again, for the streams to write parameters.
    landed: Arc<Mapping>,
    /// The first values of blocks, in jobs that may go back to their beginning: with checkpoints, before the first.
    initial: Vec<f32>,
    /// Where the servers leave it to the trainers.
    momentum: Option<Momentum>,
    coder: Coder,
    buffers: Buffers,
    exchange: Exchange,
    next_step: u64,
    /// Counts the times that this trainer has taken its place among the servers.
    entries: u64,
    /// The servers need this trainer no more.
    concluded: bool,
    /// This trainer has said that it makes only so many steps, where it did not know so at the start.
    last: Option<u64>,
    /// In an elastic job.
    assigned: AssignedBatches,
    waiting: Duration,
    /// When it was seen that this trainer is to stop.
    interrupted: Option<Instant>,
    attendance: Attendance,
    events: mpsc::UnboundedReceiver<Event>,
    sender: mpsc::UnboundedSender<Event>,
    generation: u64,
}

fn map_again(memory: &Mapping) -> io::Result<Mapping> {
    Mapping::receive(memory.file().try_clone_to_owned()?, memory.elements())
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
        let no_memory = |source| ClientError::Memory { elements: initial.len(), source };
        let mut memory = Mapping::new(initial.len()).map_err(no_memory)?;
        let landed = Arc::new(map_again(&memory).map_err(no_memory)?);
        memory.parameters_mut().copy_from_slice(initial);
        // Not more than one answer for each block, and its end, of a link.
        let (sender, events) = mpsc::unbounded_channel();
        let buffers = Buffers::default();
        let mut session = Self {
            connect_timeout: config.connect_timeout,
            links: Vec::new(),
            memory,
            landed,
            initial: initial.to_vec(),
            momentum: None,
            coder: Coder::new(&config.compression, buffers.clone()),
            buffers,
            exchange: Exchange::new(layout.clone(), config.servers.len(), config.overlap),
            next_step: 0,
            entries: 0,
            concluded: false,
            last: None,
            assigned: AssignedBatches::default(),
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
        session.begin_series();
        if session.links.iter().all(|link| link.epoch == 0) {
            session.initial = Vec::new();
        }
        Ok(session)
    }

    /// Returns the epoch of the servers' state, which grows when they go back to a checkpoint; 0 where none are kept.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.links.iter().map(|link| link.epoch).max().unwrap_or(0)
    }

    /// Returns the elements of a block: gradients leave in units of so many.
    #[must_use]
    pub fn block_elements(&self) -> usize {
        self.layout.block_elements()
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

    /// Maps parameters and gradients once more, for a holder that may outlive this session. What either side writes, the
    /// other sees.
    ///
    /// # Errors
    /// If the system does not map them.
    pub fn map_memory(&self) -> io::Result<Mapping> {
        map_again(&self.memory)
    }

    /// Sets the steps that this trainer is going to do, or in an elastic job the batches that all are going to read, if
    /// they were not known when it joined.
    pub fn set_total_steps(&mut self, total: u64) {
        self.config.total_steps = total;
    }

    /// Returns the configuration, for tables beside this session, which no longer knows its last step: that ends with theirs.
    pub(super) fn config_without_end(&mut self) -> SessionConfig {
        self.config.total_steps = SessionConfig::UNKNOWN_STEPS;
        let at_end = self.config.waiting_time_at_end(self.epoch());
        let connect_timeout = if self.concluded { at_end } else { self.connect_timeout };
        SessionConfig { connect_timeout, ..self.config.clone() }
    }

    /// Makes the step before the next one this trainer's last, and waits until losing servers can no longer cost any of
    /// its steps. Returns the next step: an earlier one if the servers had to go back to a checkpoint.
    ///
    /// # Errors
    /// If a server stays away, or the wait is interrupted.
    pub async fn finish(&mut self) -> Result<u64, ClientError> {
        loop {
            let last = self.next_step;
            let next = self.try_to_finish().await?;
            if self.concluded || next < last {
                return Ok(next);
            }
        }
    }

    /// As [`AsyncSession::finish`], but returns also when the servers went back to a checkpoint that has every step of this
    /// trainer's parameters, before it had said that there are no more. Tables beside this session may lack one of them.
    pub(super) async fn try_to_finish(&mut self) -> Result<u64, ClientError> {
        let total = std::mem::replace(&mut self.config.total_steps, self.next_step);
        self.last = Some(self.next_step);
        if let Settled::Rewound = self.conclude().await? {
            // The caller says again which step is its last.
            self.config.total_steps = total;
            self.enter_anew().await?;
        }
        Ok(self.next_step)
    }

    /// Time spent in [`AsyncSession::exchange`] so far: waiting for servers, other trainers and the network.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Losing servers can no longer cost any of this trainer's steps, and it has said that there are no more.
    pub(super) const fn has_concluded(&self) -> bool {
        self.concluded
    }

    /// Takes back time that was counted as waiting, in which the trainer has computed.
    pub(super) fn did_not_wait(&mut self, time: Duration) {
        self.waiting -= time;
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
        let settled = self.settle(Purpose::Step, step).await?;
        let next = self.complete(step, settled, start).await?;
        self.take_parameters();
        Ok(next)
    }

    /// The trainer takes the parameters as they are now, and computes its next gradient with them. It says so if its exchanges
    /// overlap ([`SessionConfig::overlap`]) and this one has ended before it computes the next gradient: else that one counts as
    /// computed meanwhile.
    pub fn take_parameters(&mut self) {
        self.exchange.take();
    }

    /// Returns the updates of a block that the parameters contain with which the gradient was computed that was exchanged last.
    #[must_use]
    pub fn version_of_gradient(&self, block: u32) -> u64 {
        self.exchange.version(block)
    }

    /// As [`AsyncSession::exchange`], while the gradients are still being computed; it waits from when the last one is
    /// `ready`. The gradients before the first that is ready may be written meanwhile.
    ///
    /// # Errors
    /// As [`AsyncSession::exchange`], and [`ClientError::Interrupted`] if the step is given up.
    pub(super) async fn exchange_gradually(
        &mut self,
        step: u64,
        ready: &mut watch::Receiver<Ready>,
    ) -> Result<u64, ClientError> {
        let (settled, complete) = self.settle_gradually(step, ready).await?;
        self.complete(step, settled, complete).await
    }

    /// Ends a step in which the trainer has waited since `start`.
    async fn complete(&mut self, step: u64, settled: Settled, start: Instant) -> Result<u64, ClientError> {
        let settled = match settled {
            Settled::Done if step + 1 == self.config.total_steps && !self.config.elastic => self.conclude().await?,
            settled => settled,
        };
        match settled {
            Settled::Done => {
                self.next_step = step + 1;
                self.assigned.did_one();
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
        self.shares().ask(step, base, work).await
    }

    /// Returns the way to this trainer's share of the examples, which can be asked for also while the session exchanges.
    pub(super) fn shares(&self) -> Shares {
        Shares::new(self.attendance.client(0), &self.config)
    }

    /// Sets what the next heartbeats report: examples read by this process so far, metrics, and where its time has gone, if the
    /// trainer measures that.
    pub fn report(&self, examples: u64, metrics: &BTreeMap<String, f64>, spent: Option<TimeSpent>) {
        let (waiting, dealt) = (self.waiting, self.assigned.reported());
        self.attendance.report(Report { step: 0, examples, metrics: metrics.clone(), waiting, dealt, spent });
    }

    /// Returns where the values of metrics are recorded over time, for the series that server 0 keeps. It takes them also
    /// while an exchange is under way.
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.attendance.recorder()
    }

    /// Discards the recorded points of steps that are made again. Batches of an elastic job are not: others make them.
    fn begin_series(&self) {
        if let Some(done) = self.steps_done() {
            self.recorder().begin_at(done);
        }
    }

    /// Returns the steps that are done, as the series of metrics counts them; none in an elastic job, which counts batches.
    pub(super) fn steps_done(&self) -> Option<u64> {
        (!self.config.elastic).then(|| self.next_step * u64::from(self.config.local_steps.max(1)))
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub async fn leave(self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        let Self { config, attendance, waiting, concluded, initial, assigned, next_step, links, .. } = self;
        let step = if config.elastic { 0 } else { next_step };
        attendance.report(Report { step, examples, metrics, waiting, dealt: assigned.reported(), spent: None });
        let kept = concluded && !initial.is_empty();
        let epoch = links.first().map_or(0, |link| link.epoch);
        match attendance.leave(&config, finished, concluded, epoch).await {
            // Servers wait for the process that has this trainer's place, so this one has not finished the trainer's work.
            Err(error @ ClientError::Conflict { .. }) => Err(error),
            Err(error) if finished && kept => {
                tracing::warn!(%error, "a server does not hear that this trainer leaves; it will see so in the checkpoint");
                Ok(())
            }
            left => left,
        }
    }

    /// Leaves every server with an error of this trainer's own, which `failure` describes. Servers that were started by
    /// hand end with it; others wait for this trainer's replacement.
    pub async fn fail(self, failure: String) {
        let Self { config, attendance, .. } = self;
        attendance.fail(&config, failure).await;
    }
}
