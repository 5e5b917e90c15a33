//! A step whose gradients leave one after the other, while those of the layers before them are still being computed.

use std::panic::resume_unwind;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::error::ClientError;
use super::exchange::Ready;
use super::session::AsyncSession;

/// A step under way. Its task owns the session meanwhile, so that blocks leave and parameters arrive while the trainer
/// computes. It ends with this value.
///
/// Parameters are put in place as they arrive: those whose gradients have left must not be read any more in this step.
pub struct GradualStep {
    ready: watch::Sender<Ready>,
    task: AbortOnDropHandle<(AsyncSession, Result<u64, ClientError>)>,
}

impl GradualStep {
    /// Begins `step` on `runtime`. The gradients of the elements from `first` on are in the session's memory.
    #[must_use]
    pub fn begin(mut session: AsyncSession, runtime: &Handle, step: u64, first: usize) -> Self {
        let (ready, mut changes) = watch::channel(Ready::From(first));
        let task = runtime.spawn(async move {
            let outcome = session.exchange_gradually(step, &mut changes).await;
            (session, outcome)
        });
        Self { ready, task: AbortOnDropHandle::new(task) }
    }

    /// The gradients of the elements from `first` on are there.
    pub fn offer(&self, first: usize) {
        // A step that has failed says so at its end.
        let _ = self.ready.send(Ready::From(first));
    }

    /// Gives the step up: what has left of it counts, and the rest is sent by whoever does the step again.
    pub fn give_up(&self) {
        // As above.
        let _ = self.ready.send(Ready::GivenUp);
    }

    /// Waits for the end of the step, all of whose gradients are there now or that was given up. Returns the session and
    /// what [`AsyncSession::exchange`] returns. May be dropped and called again.
    ///
    /// # Panics
    /// If the task has panicked, or its runtime has ended.
    pub async fn end(&mut self) -> (AsyncSession, Result<u64, ClientError>) {
        if *self.ready.borrow() != Ready::GivenUp {
            self.offer(0);
        }
        match (&mut self.task).await {
            Ok(ended) => ended,
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            Err(_) => panic!("the runtime of a session lives longer than its step"),
        }
    }
}
