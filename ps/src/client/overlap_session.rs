//! A session whose exchanges may be under way while its trainer computes: an [`AsyncSession`] that a task has meanwhile, and
//! what can be asked of it all the same. Trainers in Rust use it by [`Session`](super::Session), those in Python directly.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::Duration;

use futures::FutureExt as _;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::error::ClientError;
use super::gradual_step::GradualStep;
use super::recorder::Recorder;
use super::session::AsyncSession;
use super::shares::Shares;
use super::time_spent::TimeSpent;
use crate::batch::sharing::{Share, Work};

/// A trainer's session, or the exchange that has it. A future that waits for an exchange under way may be dropped, and the
/// exchange goes on.
pub struct OverlapSession {
    state: State,
    /// How the exchange ended that was under way when something else was asked of the session.
    ended: Option<Result<Ended, ClientError>>,
    recorder: Recorder,
    runtime: Handle,
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The next step to do.
    pub next: u64,
    /// The servers have gone back to a checkpoint, or on without this trainer: what it has computed since the exchange began
    /// does not count, and the step of the exchange only if `next` is the one after it.
    pub has_gone_back: bool,
}

enum State {
    Idle(Box<AsyncSession>),
    /// An exchange is under way, whose task has the session.
    Exchanging(Box<UnderWay>),
    /// Between the two others, and after a panic in an exchange.
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
    /// Batches of an elastic job that were assigned before.
    batches: VecDeque<u64>,
    shares: Shares,
    /// A report that came meanwhile.
    report: Option<(u64, BTreeMap<String, f64>, Option<TimeSpent>)>,
    /// Values of metrics that came meanwhile, with the steps that were done. They count if the servers do not go back.
    points: Vec<(u64, BTreeMap<String, f64>)>,
}

pub(super) const BEGUN: &str = "an exchange is under way; end it first";

impl OverlapSession {
    /// Takes a session. Exchanges run on `runtime`.
    #[must_use]
    pub fn new(session: AsyncSession, runtime: Handle) -> Self {
        let recorder = session.recorder();
        Self { state: State::Idle(Box::new(session)), ended: None, recorder, runtime }
    }

    /// Returns the session while no exchange is under way.
    #[must_use]
    pub fn idle(&self) -> Option<&AsyncSession> {
        if let State::Idle(session) = &self.state { Some(session) } else { None }
    }

    /// As [`OverlapSession::idle`].
    pub fn idle_mut(&mut self) -> Option<&mut AsyncSession> {
        if let State::Idle(session) = &mut self.state { Some(session) } else { None }
    }

    /// Returns whether an exchange is under way.
    #[must_use]
    pub fn is_exchanging(&self) -> bool {
        matches!(self.state, State::Exchanging(_))
    }

    /// Returns whether gradients of a step are under way whose others are still computed: only [`OverlapSession::exchange`]
    /// and [`OverlapSession::begin_exchange`] may follow.
    #[must_use]
    pub fn is_in_part(&self) -> bool {
        matches!(&self.state, State::Exchanging(under_way) if under_way.complete.is_none())
    }

    /// The first step that the servers do not have from this trainer; while an exchange is under way, the one after it.
    ///
    /// # Panics
    /// After a panic in an exchange.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.known(|under_way| under_way.next_step, AsyncSession::next_step)
    }

    /// See [`AsyncSession::entries`]; while an exchange is under way, as when it began.
    ///
    /// # Panics
    /// After a panic in an exchange.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.known(|under_way| under_way.entries, AsyncSession::entries)
    }

    /// Time spent waiting so far: for servers, other trainers and the network.
    ///
    /// # Panics
    /// After a panic in an exchange.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.known(|under_way| under_way.waiting, AsyncSession::waiting)
    }

    fn known<T>(&self, exchanging: impl FnOnce(&UnderWay) -> T, idle: impl FnOnce(&AsyncSession) -> T) -> T {
        match &self.state {
            State::Exchanging(under_way) => exchanging(under_way),
            State::Idle(session) => idle(session),
            State::Gone => panic!("{BEGUN}"),
        }
    }

    /// Lets the gradients of `step` from element `first` on leave, while those before are still computed;
    /// [`OverlapSession::exchange`] or [`OverlapSession::begin_exchange`] says that all are there.
    ///
    /// # Panics
    /// After a panic in an exchange.
    pub fn offer(&mut self, step: u64, first: usize) {
        match &self.state {
            State::Exchanging(under_way) => under_way.exchange.offer(first),
            _ => self.begin(step, first, None),
        }
    }

    /// Begins the exchange of `step`, all of whose gradients are there, and returns at once. Gradients and parameters are the
    /// exchange's until [`OverlapSession::end_exchange`].
    ///
    /// # Panics
    /// While another exchange is under way.
    pub fn begin_exchange(&mut self, step: u64) {
        if let State::Exchanging(under_way) = &mut self.state
            && under_way.complete.is_none()
        {
            under_way.exchange.offer(0);
            under_way.complete = Some(Instant::now());
            return;
        }
        self.begin(step, 0, Some(Instant::now()));
    }

    fn begin(&mut self, step: u64, first: usize, complete: Option<Instant>) {
        self.ended = None;
        let State::Idle(mut session) = std::mem::replace(&mut self.state, State::Gone) else { panic!("{BEGUN}") };
        let (entries, waiting, next_step) = (session.entries(), session.waiting(), step + 1);
        let (batches, shares) = (session.take_assigned(), session.shares());
        let exchange = GradualStep::begin(*session, &self.runtime, step, first);
        self.state = State::Exchanging(Box::new(UnderWay {
            exchange,
            complete,
            next_step,
            entries,
            waiting,
            batches,
            shares,
            report: None,
            points: Vec::new(),
        }));
    }

    /// See [`AsyncSession::exchange`]. Ends the step whose gradients are under way in part, all of which are there now.
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient, or the wait is interrupted; the last words can be
    /// said all the same.
    ///
    /// # Panics
    /// After a panic in an exchange.
    pub async fn exchange(&mut self, step: u64) -> Result<u64, ClientError> {
        if self.is_exchanging() {
            self.wait_until_idle().await;
            if let Some(ended) = self.ended.take() {
                let next = ended?.next;
                self.idle_mut().expect(BEGUN).take_parameters();
                return Ok(next);
            }
        }
        // The end of an earlier exchange that was not asked for is none of this one's.
        self.ended = None;
        self.idle_mut().expect(BEGUN).exchange(step).await
    }

    /// Waits for the exchange that was begun; `None` if none was, or the trainer has learned by [`OverlapSession::entries`],
    /// in [`OverlapSession::next_batch`], that it does not count. The next gradient, if exchanges overlap, was computed
    /// meanwhile.
    pub async fn end_exchange(&mut self) -> Option<Result<Ended, ClientError>> {
        self.wait_until_idle().await;
        self.ended.take()
    }

    /// As [`OverlapSession::end_exchange`], for a trainer that computes its next gradient with the parameters that have come.
    pub async fn settle(&mut self) -> Option<Result<Ended, ClientError>> {
        let ended = self.end_exchange().await;
        if let Some(session) = self.idle_mut() {
            session.take_parameters();
        }
        ended
    }

    /// See [`AsyncSession::next_batch`]. `total` is the number of batches that all trainers read, if it was not known when this
    /// one joined. Waits for the exchange under way unless a batch was assigned before it.
    ///
    /// # Errors
    /// If server 0 stays away or refuses, or the wait is interrupted.
    ///
    /// # Panics
    /// After a panic in an exchange.
    pub async fn next_batch(&mut self, total: Option<u64>) -> Result<Option<u64>, ClientError> {
        if let State::Exchanging(under_way) = &mut self.state
            && let Some(batch) = under_way.batches.pop_front()
        {
            return Ok(Some(batch));
        }
        let entries = self.entries();
        self.wait_until_idle().await;
        if let Some(Err(error)) = self.ended.take_if(|ended| ended.is_err()) {
            return Err(error);
        }
        let session = self.idle_mut().expect(BEGUN);
        if let Some(total) = total {
            session.set_total_steps(total);
        }
        let answer = session.next_batch().await;
        if self.entries() != entries {
            // The exchange is of before. The trainer sees so, and takes the parameters of now.
            self.ended = None;
        }
        answer
    }

    /// See [`AsyncSession::share_batch`].
    ///
    /// # Errors
    /// If the job has another base, or fixed shares.
    ///
    /// # Panics
    /// After a panic in an exchange.
    pub async fn share_batch(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        match &self.state {
            State::Exchanging(under_way) => under_way.shares.ask(step, base, work).await,
            _ => self.idle().expect(BEGUN).share_batch(step, base, work).await,
        }
    }

    /// See [`AsyncSession::report`].
    pub fn report(&mut self, examples: u64, metrics: &BTreeMap<String, f64>, spent: Option<TimeSpent>) {
        match &mut self.state {
            State::Exchanging(under_way) => under_way.report = Some((examples, metrics.clone(), spent)),
            State::Idle(session) => session.report(examples, metrics, spent),
            State::Gone => {}
        }
    }

    /// Records values of metrics, for example the loss, when `step` steps are done, the step of the exchange under way among
    /// them: if the servers go back meanwhile to where it is not done, the values are left out.
    pub fn record(&mut self, step: u64, metrics: &BTreeMap<String, f64>) {
        match &mut self.state {
            State::Exchanging(under_way) => under_way.points.push((step, metrics.clone())),
            _ => self.recorder.record(step, metrics),
        }
    }

    /// See [`AsyncSession::recorder`].
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// Gives up the exchange whose gradients are under way in part: the others will not come.
    pub fn give_up(&self) {
        if let State::Exchanging(under_way) = &self.state {
            under_way.exchange.give_up();
        }
    }

    /// Waits for the exchange under way, and returns the session; none after a panic in an exchange.
    pub async fn into_session(mut self) -> Option<AsyncSession> {
        self.wait_until_idle().await;
        if let State::Idle(session) = self.state { Some(*session) } else { None }
    }

    /// Ends the exchange under way, if one is, and keeps its outcome.
    async fn wait_until_idle(&mut self) {
        let State::Exchanging(under_way) = &mut self.state else { return };
        let computed = under_way.complete.map_or(Duration::ZERO, |since| since.elapsed());
        let ended = AssertUnwindSafe(under_way.exchange.end()).catch_unwind().await;
        let (mut session, outcome) = match ended {
            Ok(ended) => ended,
            // It cannot be waited for again: the session is gone with its task.
            Err(panic) => {
                self.state = State::Gone;
                resume_unwind(panic)
            }
        };
        // The exchange has counted its time since all gradients were there, in part of which the trainer has computed.
        session.did_not_wait(computed.min(session.waiting() - under_way.waiting));
        let has_gone_back = session.entries() != under_way.entries;
        if !has_gone_back {
            session.return_assigned(std::mem::take(&mut under_way.batches));
        }
        let last = if has_gone_back { session.steps_done() } else { Some(u64::MAX) };
        for (step, metrics) in under_way.points.drain(..).filter(|(step, _)| Some(*step) <= last) {
            self.recorder.record(step, &metrics);
        }
        if let Some((examples, metrics, spent)) = under_way.report.take() {
            session.report(examples, &metrics, spent);
        }
        self.ended = Some(outcome.map(|next| Ended { next, has_gone_back }));
        self.state = State::Idle(Box::new(session));
    }
}
