//! A session for a training loop, which waits: an [`AsyncSession`] and the runtime that it lives on.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::config::SessionConfig;
use super::error::ClientError;
use super::gradual_step::GradualStep;
use super::lane::threads;
use super::recorder::Recorder;
use super::runtime::network;
use super::session::AsyncSession;
use crate::batch::sharing::{Share, Work};
use crate::shm::Mapping;

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct Session {
    // Dropped before the runtime that its tasks run on.
    state: State,
    /// How the exchange ended that was under way when something else was asked of the session.
    ended: Option<Result<u64, ClientError>>,
    recorder: Recorder,
    runtime: Runtime,
}

enum State {
    Idle(Box<AsyncSession>),
    /// An exchange is under way, whose task has the session.
    Exchanging(UnderWay),
    /// Between the two others.
    Gone,
}

/// The knowledge of a session while it exchanges.
struct UnderWay {
    exchange: GradualStep,
    /// Since when all gradients are there, if the trainer goes on to compute meanwhile.
    complete: Option<Instant>,
    next_step: u64,
    entries: u64,
    waiting: Duration,
    /// A report that came meanwhile.
    report: Option<(u64, BTreeMap<String, f64>)>,
}

const BEGUN: &str = "an exchange is under way; end it first";

impl Session {
    /// See [`AsyncSession::join`].
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig, initial: &[f32]) -> Result<Self, ClientError> {
        let runtime = network(threads(config.connections))?;
        let session = runtime.block_on(AsyncSession::join(config, initial))?;
        let recorder = session.recorder();
        Ok(Self { state: State::Idle(Box::new(session)), ended: None, recorder, runtime })
    }

    /// The first step that the servers do not have from this trainer; above 0 after a restart. While an exchange is under
    /// way, the one after it.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        match &self.state {
            State::Exchanging(under_way) => under_way.next_step,
            _ => self.idle().next_step(),
        }
    }

    /// All parameters, flat, as of the last exchange.
    ///
    /// # Panics
    /// While an exchange is under way.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        self.idle().parameters()
    }

    /// All gradients, flat, to be filled before [`Session::exchange`].
    ///
    /// # Panics
    /// While an exchange is under way.
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        let State::Idle(session) = &mut self.state else { panic!("{BEGUN}") };
        session.gradients_mut()
    }

    /// See [`AsyncSession::map_memory`].
    ///
    /// # Errors
    /// If the system does not map it.
    ///
    /// # Panics
    /// While an exchange is under way.
    pub fn map_memory(&self) -> io::Result<Mapping> {
        self.idle().map_memory()
    }

    /// Time spent waiting so far: for servers, other trainers and the network.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        match &self.state {
            State::Exchanging(under_way) => under_way.waiting,
            _ => self.idle().waiting(),
        }
    }

    /// See [`AsyncSession::exchange`]. All gradients are there now, also those that were not offered.
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient, or the wait is interrupted; the last words can be
    /// said all the same.
    pub fn exchange(&mut self, step: u64) -> Result<u64, ClientError> {
        self.wait_until_idle();
        if let Some(ended) = self.ended.take() {
            return ended;
        }
        let State::Idle(session) = &mut self.state else { panic!("{BEGUN}") };
        self.runtime.block_on(session.exchange(step))
    }

    /// Lets the gradients of `step` from element `first` on leave, while those before are still computed;
    /// [`Session::exchange`] ends the step. Its gradients are written to a mapping of the memory, and not changed when they
    /// were offered.
    pub fn offer(&mut self, step: u64, first: usize) {
        match &self.state {
            State::Exchanging(under_way) => under_way.exchange.offer(first),
            _ => self.begin(step, first, None),
        }
    }

    /// Begins the exchange of `step` and returns at once. Gradients and parameters are the exchange's until
    /// [`Session::end_exchange`].
    ///
    /// # Panics
    /// While an exchange is under way.
    pub fn begin_exchange(&mut self, step: u64) {
        self.begin(step, 0, Some(Instant::now()));
    }

    fn begin(&mut self, step: u64, first: usize, complete: Option<Instant>) {
        let State::Idle(session) = std::mem::replace(&mut self.state, State::Gone) else { panic!("{BEGUN}") };
        let (entries, waiting) = (session.entries(), session.waiting());
        let exchange = GradualStep::begin(*session, self.runtime.handle(), step, first);
        let next_step = step + 1;
        self.state = State::Exchanging(UnderWay { exchange, complete, next_step, entries, waiting, report: None });
    }

    /// Waits for the exchange that was begun. Returns what [`Session::exchange`] returns, `None` if none was begun.
    pub fn end_exchange(&mut self) -> Option<Result<u64, ClientError>> {
        self.wait_until_idle();
        self.ended.take()
    }

    /// See [`AsyncSession::entries`].
    #[must_use]
    pub fn entries(&self) -> u64 {
        match &self.state {
            State::Exchanging(under_way) => under_way.entries,
            _ => self.idle().entries(),
        }
    }

    /// See [`AsyncSession::next_batch`]. Waits for the exchange under way.
    ///
    /// # Errors
    /// If server 0 stays away or refuses, or the wait is interrupted.
    pub fn next_batch(&mut self) -> Result<Option<u64>, ClientError> {
        self.wait_until_idle();
        if let Some(error) = self.ended.take_if(|ended| ended.is_err()) {
            return error.map(Some);
        }
        let State::Idle(session) = &mut self.state else { panic!("{BEGUN}") };
        self.runtime.block_on(session.next_batch())
    }

    /// See [`AsyncSession::share_batch`].
    ///
    /// # Errors
    /// If the job has another base, or fixed shares.
    ///
    /// # Panics
    /// While an exchange is under way.
    pub fn share_batch(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        self.runtime.block_on(self.idle().share_batch(step, base, work))
    }

    /// Sets what the next heartbeats report: examples read by this process so far, and metrics.
    pub fn report(&mut self, examples: u64, metrics: &BTreeMap<String, f64>) {
        match &mut self.state {
            State::Exchanging(under_way) => under_way.report = Some((examples, metrics.clone())),
            _ => self.idle().report(examples, metrics),
        }
    }

    /// See [`AsyncSession::recorder`].
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come. Waits for the
    /// exchange under way.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub fn leave(self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        let (session, runtime) = self.into_idle();
        runtime.block_on(session.leave(finished, examples, metrics))
    }

    /// See [`AsyncSession::fail`]. Gives up the exchange under way.
    pub fn fail(self, failure: String) {
        if let State::Exchanging(under_way) = &self.state {
            under_way.exchange.give_up();
        }
        let (session, runtime) = self.into_idle();
        runtime.block_on(session.fail(failure));
    }

    /// Ends the exchange under way, if one is, and keeps its outcome.
    fn wait_until_idle(&mut self) {
        let State::Exchanging(UnderWay { exchange, complete, waiting, report, .. }) = &mut self.state else { return };
        let computed = complete.map_or(Duration::ZERO, |since| since.elapsed());
        let (mut session, outcome) = self.runtime.block_on(exchange.end());
        // The exchange has counted its time since all gradients were there, in part of which the trainer has computed.
        session.did_not_wait(computed.min(session.waiting() - *waiting));
        if let Some((examples, metrics)) = report {
            session.report(*examples, metrics);
        }
        self.ended = Some(outcome);
        self.state = State::Idle(Box::new(session));
    }

    fn idle(&self) -> &AsyncSession {
        let State::Idle(session) = &self.state else { panic!("{BEGUN}") };
        session
    }

    fn into_idle(mut self) -> (AsyncSession, Runtime) {
        self.wait_until_idle();
        let State::Idle(session) = self.state else { panic!("{BEGUN}") };
        (*session, self.runtime)
    }
}
