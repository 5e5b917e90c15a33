//! Tables for a training loop, which waits: [`AsyncTables`] and the runtime that they live on. Pulls and pushes can be
//! begun and waited for later, so that they travel while the trainer computes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::{AsyncTables, RowGradients, owned};
use crate::client::config::SessionConfig;
use crate::client::connecting::until;
use crate::client::error::ClientError;
use crate::client::layers::Layers;
use crate::client::runtime::network;
use crate::sparse::TableSpec;

/// The job's sparse tables, as one trainer sees them. The trainer takes part in the job as a
/// [`Member`](crate::client::Member) of the same configuration.
pub struct Tables {
    tables: AsyncTables,
    waiting: Duration,
    runtime: Runtime,
}

/// Rows on their way.
#[derive(Debug)]
#[must_use = "the rows come with Tables::pulled"]
pub struct Pulling(JoinHandle<Result<Vec<Vec<f32>>, ClientError>>);

/// Gradients on their way.
#[derive(Debug)]
#[must_use = "Tables::pushed says when the trainer may go on"]
pub struct Pushing(JoinHandle<Result<(), ClientError>>);

impl Tables {
    /// See [`AsyncTables::open`].
    ///
    /// # Errors
    /// If a server stays away, or refuses the tables.
    pub fn open(config: SessionConfig, specs: Vec<TableSpec>) -> Result<Self, ClientError> {
        let runtime = network(1)?;
        let tables = runtime.block_on(AsyncTables::open(config, specs))?;
        Ok(Self { tables, waiting: Duration::ZERO, runtime })
    }

    /// See [`AsyncTables::reopen`].
    ///
    /// # Errors
    /// As [`Tables::open`].
    pub fn reopen(&mut self) -> Result<(), ClientError> {
        let start = Instant::now();
        self.runtime.block_on(self.tables.reopen())?;
        self.waiting += start.elapsed();
        Ok(())
    }

    /// Counts the times that the servers went to a checkpoint; 0 where they keep none.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.tables.epoch()
    }

    /// The first step that not all servers have from this trainer.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.tables.next_step()
    }

    /// The tables.
    #[must_use]
    pub fn specs(&self) -> &[TableSpec] {
        self.tables.specs()
    }

    /// Time spent waiting for rows and for the consistency rule so far.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Asks for the rows of keys, by table. A key without a row comes with its initial values.
    pub fn begin_pull(&self, wanted: &[(usize, &[u64])]) -> Pulling {
        let (wanted, shared) = (owned(wanted), self.tables.shared.clone());
        Pulling(self.runtime.spawn(async move { shared.pull(&wanted).await }))
    }

    /// The rows, of each of those wanted one behind the other in the order of its keys.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    pub fn pulled(&mut self, pulling: Pulling) -> Result<Vec<Vec<f32>>, ClientError> {
        let start = Instant::now();
        let rows = self.runtime.block_on(pulling.0).map_err(|_| ClientError::Interrupted)?;
        self.waiting += start.elapsed();
        rows
    }

    /// Both at once.
    ///
    /// # Errors
    /// As [`Tables::pulled`].
    pub fn pull(&mut self, wanted: &[(usize, &[u64])]) -> Result<Vec<Vec<f32>>, ClientError> {
        let pulling = self.begin_pull(wanted);
        self.pulled(pulling)
    }

    /// Sends all gradients of a step, at most one set for each table. Sent again, they are not applied again.
    ///
    /// # Panics
    /// If a set has not as many rows as keys.
    pub fn begin_push(&self, step: u64, gradients: &[RowGradients]) -> Pushing {
        let requests = self.tables.shared.requests(step, gradients);
        let shared = self.tables.shared.clone();
        Pushing(self.runtime.spawn(async move { shared.push(requests).await }))
    }

    /// Waits until the consistency rule lets this trainer go on.
    ///
    /// # Errors
    /// If a server stays away or refuses, or the wait is interrupted.
    pub fn pushed(&mut self, pushing: Pushing) -> Result<(), ClientError> {
        let start = Instant::now();
        let done = self.runtime.block_on(pushing.0).map_err(|_| ClientError::Interrupted)?;
        self.waiting += start.elapsed();
        done
    }

    /// As [`Tables::pushed`], but gives up waiting when `other` is set. The gradients arrive all the same.
    ///
    /// # Errors
    /// As [`Tables::pushed`]; [`ClientError::Interrupted`] when `other` is set.
    pub fn pushed_unless(&mut self, pushing: Pushing, other: &AtomicBool) -> Result<(), ClientError> {
        let start = Instant::now();
        let done = self.runtime.block_on(async {
            tokio::select! {
                done = pushing.0 => done.map_err(|_| ClientError::Interrupted)?,
                () = until(|| other.load(Ordering::Acquire)) => Err(ClientError::Interrupted),
            }
        });
        self.waiting += start.elapsed();
        done
    }

    /// Both at once.
    ///
    /// # Errors
    /// As [`Tables::pushed`].
    pub fn push(&mut self, step: u64, gradients: &[RowGradients]) -> Result<(), ClientError> {
        let pushing = self.begin_push(step, gradients);
        self.pushed(pushing)
    }

    /// See [`AsyncTables::wants_layers`].
    #[must_use]
    pub fn wants_layers(&self, steps: u64) -> bool {
        self.tables.wants_layers(steps)
    }

    /// See [`AsyncTables::keep`].
    ///
    /// # Errors
    /// If a server stays away or refuses; [`ClientError::TablesLost`] if the servers have gone to a checkpoint since.
    ///
    /// # Panics
    /// If the state has another length than the tensors.
    pub fn keep(&mut self, layers: &Layers) -> Result<(), ClientError> {
        self.runtime.block_on(self.tables.keep(layers))
    }

    /// See [`AsyncTables::keep_at_stop`].
    pub fn keep_at_stop(&mut self, layers: &Layers) {
        self.runtime.block_on(self.tables.keep_at_stop(layers));
    }

    /// See [`AsyncTables::kept`].
    ///
    /// # Errors
    /// If a server stays away or refuses.
    pub fn kept(&mut self) -> Result<Option<Layers>, ClientError> {
        self.runtime.block_on(self.tables.kept())
    }

    /// See [`AsyncTables::conclude`].
    ///
    /// # Errors
    /// If server 0 stays away.
    pub fn conclude(&mut self) -> Result<bool, ClientError> {
        self.runtime.block_on(self.tables.conclude())
    }
}
