//! The tasks that own the blocks and rows of a server. One that panics has lost its part of the parameters: the server says so
//! and must end, because it would stay ready and answer for the other parts only.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// The thing that a task owns, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owned {
    /// A block of parameters.
    Block(u32),
    /// A part of the rows of sparse tables.
    Rows(usize),
    /// The roles in which this server holds blocks that another one holds too.
    Roles,
}

impl fmt::Display for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(block) => write!(f, "block {block}"),
            Self::Rows(part) => write!(f, "part {part} of the rows"),
            Self::Roles => f.write_str("the roles of this server"),
        }
    }
}

/// A task that panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked {
    /// The thing that it owned.
    pub owned: Owned,
    /// The words of the panic.
    pub why: String,
}

/// Starts tasks that own parts of the parameters, and reports the first that panics.
#[derive(Clone, Debug)]
pub struct OwnerTasks {
    tasks: TaskTracker,
    panicked: watch::Sender<Option<Panicked>>,
}

impl OwnerTasks {
    /// Starts tasks among `tasks`.
    #[must_use]
    pub fn new(tasks: TaskTracker) -> Self {
        Self { tasks, panicked: watch::Sender::new(None) }
    }

    /// Starts the task that owns `owned`.
    pub fn spawn(&self, owned: Owned, task: impl Future<Output = ()> + Send + 'static) {
        let watched = self.watched(owned, task);
        self.tasks.spawn(async move {
            watched.await;
        });
    }

    /// Returns `task`, which owns `owned`, such that a panic of it is reported and ends it with `None`.
    pub fn watched<F: Future>(&self, owned: Owned, task: F) -> impl Future<Output = Option<F::Output>> + use<F> {
        let panicked = self.panicked.clone();
        async move {
            // Nothing that the task may have left half-written is used afterwards: the server ends.
            let panic = match AssertUnwindSafe(task).catch_unwind().await {
                Ok(result) => return Some(result),
                Err(panic) => panic,
            };
            let why = words(&*panic);
            tracing::error!(%owned, why, "the task of {owned} panicked");
            panicked.send_if_modified(|first| {
                let is_first = first.is_none();
                first.get_or_insert(Panicked { owned, why });
                is_first
            });
            None
        }
    }

    /// Waits until a task panics.
    pub async fn panicked(&self) -> Panicked {
        let mut panicked = self.panicked.subscribe();
        let first = panicked.wait_for(Option::is_some).await.map(|first| first.clone());
        match first {
            Ok(Some(first)) => first,
            // The sender is held here, so the value comes or the wait lasts.
            _ => std::future::pending().await,
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it said nothing".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_task_that_panics_is_reported_and_those_that_end_are_not() {
        let tasks = OwnerTasks::new(TaskTracker::new());
        tasks.spawn(Owned::Block(1), async {});
        assert!(tasks.panicked().now_or_never().is_none(), "none has panicked");
        tasks.spawn(Owned::Rows(2), async { panic!("row {} is broken", 7) });
        let first = Panicked { owned: Owned::Rows(2), why: "row 7 is broken".to_owned() };
        assert_eq!(tasks.panicked().await, first);
        tasks.spawn(Owned::Block(3), async { panic!("another") });
        tasks.tasks.close();
        tasks.tasks.wait().await;
        assert_eq!(tasks.panicked().await, first);
    }

    #[tokio::test]
    async fn a_task_that_is_watched_gives_its_result_or_is_reported() {
        let tasks = OwnerTasks::new(TaskTracker::new());
        assert_eq!(tasks.watched(Owned::Roles, async { 7 }).await, Some(7));
        assert!(tasks.panicked().now_or_never().is_none(), "none has panicked");
        assert_eq!(tasks.watched(Owned::Roles, async { panic!("no role") }).await, None::<()>);
        assert_eq!(tasks.panicked().await, Panicked { owned: Owned::Roles, why: "no role".to_owned() });
    }
}
