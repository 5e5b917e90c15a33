//! A session for a training loop, which waits: an [`AsyncSession`] and the runtime that it lives on.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::runtime::Runtime;

use super::config::SessionConfig;
use super::error::ClientError;
use super::lane::threads;
use super::runtime::network;
use super::session::AsyncSession;
use crate::batch::sharing::{Share, Work};

/// A trainer's place in its job. Holds the flat parameters and gradients; their memory does not
/// move while the session lives.
pub struct Session {
    // Dropped before the runtime that its tasks run on.
    session: AsyncSession,
    runtime: Runtime,
}

impl Session {
    /// See [`AsyncSession::join`].
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig, initial: &[f32]) -> Result<Self, ClientError> {
        let runtime = network(threads(config.connections))?;
        let session = runtime.block_on(AsyncSession::join(config, initial))?;
        Ok(Self { session, runtime })
    }

    /// The first step that the servers do not have from this trainer; above 0 after a restart.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.session.next_step()
    }

    /// All parameters, flat, as of the last exchange.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        self.session.parameters()
    }

    /// All gradients, flat, to be filled before [`Session::exchange`].
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        self.session.gradients_mut()
    }

    /// See [`AsyncSession::put_differences`].
    ///
    /// # Panics
    /// If there are not as many values as parameters.
    pub fn put_differences(&mut self, values: &[f32]) {
        self.session.put_differences(values);
    }

    /// Time spent in [`Session::exchange`] so far: waiting for servers, other trainers and the network.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.session.waiting()
    }

    /// See [`AsyncSession::exchange`].
    ///
    /// # Errors
    /// If a server stays away, or refuses a gradient, or the wait is interrupted; the last words can be
    /// said all the same.
    pub fn exchange(&mut self, step: u64) -> Result<u64, ClientError> {
        self.runtime.block_on(self.session.exchange(step))
    }

    /// See [`AsyncSession::entries`].
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.session.entries()
    }

    /// See [`AsyncSession::next_batch`].
    ///
    /// # Errors
    /// If server 0 stays away or refuses, or the wait is interrupted.
    pub fn next_batch(&mut self) -> Result<Option<u64>, ClientError> {
        self.runtime.block_on(self.session.next_batch())
    }

    /// See [`AsyncSession::share_batch`].
    ///
    /// # Errors
    /// If the job has another base, or fixed shares.
    pub fn share_batch(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        self.runtime.block_on(self.session.share_batch(step, base, work))
    }

    /// Sets what the next heartbeats report: examples read by this process so far, and metrics.
    pub fn report(&self, examples: u64, metrics: &BTreeMap<String, f64>) {
        self.session.report(examples, metrics);
    }

    /// Leaves every server: `finished` says that the work is done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have received the message.
    pub fn leave(self, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> Result<(), ClientError> {
        let Self { session, runtime } = self;
        runtime.block_on(session.leave(finished, examples, metrics))
    }

    /// See [`AsyncSession::fail`].
    pub fn fail(self, failure: String) {
        let Self { session, runtime } = self;
        runtime.block_on(session.fail(failure));
    }
}
