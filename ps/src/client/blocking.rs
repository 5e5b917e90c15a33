//! A session for a training loop, which waits: an [`OverlapSession`] and the runtime that it lives on.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;

use super::config::SessionConfig;
use super::error::ClientError;
use super::lane::threads;
use super::overlap_session::{BEGUN, Ended, OverlapSession};
use super::recorder::Recorder;
use super::runtime::network;
use super::session::AsyncSession;
use super::time_spent::TimeSpent;
use crate::batch::sharing::{Share, Work};
use crate::shm::Mapping;

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct Session {
    // Dropped before the runtime that its tasks run on.
    session: OverlapSession,
    runtime: Runtime,
    /// [`SessionConfig::interrupt`].
    interrupt: Arc<AtomicBool>,
}

impl Session {
    /// See [`AsyncSession::join`].
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig, initial: &[f32]) -> Result<Self, ClientError> {
        let (runtime, interrupt) = (network(threads(config.connections))?, config.interrupt.clone());
        let session = runtime.block_on(AsyncSession::join(config, initial))?;
        Ok(Self { session: OverlapSession::new(session, runtime.handle().clone()), runtime, interrupt })
    }

    /// The first step that the servers do not have from this trainer; above 0 after a restart. While an exchange is under
    /// way, the one after it.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.session.next_step()
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
        self.session.idle_mut().expect(BEGUN).gradients_mut()
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
        self.session.waiting()
    }

    /// See [`AsyncSession::exchange`]. All gradients are there now, also those that were not offered.
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient, or the wait is interrupted; the last words can be
    /// said all the same.
    pub fn exchange(&mut self, step: u64) -> Result<u64, ClientError> {
        self.runtime.block_on(self.session.exchange(step))
    }

    /// Lets the gradients of `step` from element `first` on leave, while those before are still computed;
    /// [`Session::exchange`] ends the step. Its gradients are written to a mapping of the memory, and not changed when they
    /// were offered.
    pub fn offer(&mut self, step: u64, first: usize) {
        self.session.offer(step, first);
    }

    /// See [`OverlapSession::begin_exchange`].
    ///
    /// # Panics
    /// While another exchange is under way.
    pub fn begin_exchange(&mut self, step: u64) {
        self.session.begin_exchange(step);
    }

    /// See [`OverlapSession::end_exchange`].
    pub fn end_exchange(&mut self) -> Option<Result<Ended, ClientError>> {
        self.runtime.block_on(self.session.end_exchange())
    }

    /// See [`OverlapSession::settle`].
    pub fn settle(&mut self) -> Option<Result<Ended, ClientError>> {
        self.runtime.block_on(self.session.settle())
    }

    /// See [`OverlapSession::entries`].
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.session.entries()
    }

    /// See [`OverlapSession::next_batch`].
    ///
    /// # Errors
    /// If server 0 stays away or refuses, or the wait is interrupted.
    pub fn next_batch(&mut self) -> Result<Option<u64>, ClientError> {
        self.runtime.block_on(self.session.next_batch(None))
    }

    /// See [`AsyncSession::share_batch`].
    ///
    /// # Errors
    /// If the job has another base, or fixed shares.
    pub fn share_batch(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        self.runtime.block_on(self.session.share_batch(step, base, work))
    }

    /// See [`AsyncSession::report`].
    pub fn report(&mut self, examples: u64, metrics: &BTreeMap<String, f64>, spent: Option<TimeSpent>) {
        self.session.report(examples, metrics, spent);
    }

    /// See [`OverlapSession::record`].
    pub fn record(&mut self, step: u64, metrics: &BTreeMap<String, f64>) {
        self.session.record(step, metrics);
    }

    /// See [`AsyncSession::recorder`].
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.session.recorder()
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come. Waits for the
    /// exchange under way.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message. [`ClientError::Panicked`] after a panic in an
    /// exchange: no server has received it.
    pub fn leave(self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        let Self { session, runtime, .. } = self;
        runtime.block_on(async {
            let session = session.into_session().await.ok_or(ClientError::Panicked)?;
            session.leave(finished, examples, metrics).await
        })
    }

    /// See [`AsyncSession::fail`]. Gives up the exchange under way. After a panic in an exchange nothing can be said.
    pub fn fail(self, failure: String) {
        let Self { session, runtime, interrupt } = self;
        if session.is_exchanging() {
            session.give_up();
            // It may be waiting for servers or other trainers.
            interrupt.store(true, Ordering::Relaxed);
        }
        runtime.block_on(async {
            if let Some(session) = session.into_session().await {
                session.fail(failure).await;
            }
        });
    }

    fn idle(&self) -> &AsyncSession {
        self.session.idle().expect(BEGUN)
    }
}
