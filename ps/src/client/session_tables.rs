//! Sparse tables of a trainer whose dense parameters the servers train, too: rows and parameters of a step go up together,
//! and go back together when the servers go to a checkpoint.

use super::error::ClientError;
use super::session::AsyncSession;
use super::tables::{AsyncTables, RowGradients};
use crate::sparse::TableSpec;

/// The tables that belong to an [`AsyncSession`]. Each step calls [`SessionTables::push`], which may run while the session
/// exchanges, then [`SessionTables::follow`] with what the session has returned. Where exchanges overlap, rows for the next step may
/// be pulled in between.
///
/// The order of both does not matter: the servers apply neither twice, and a step that only one of them has is done again.
pub struct SessionTables {
    tables: AsyncTables,
    /// Set when the servers have other rows than this trainer knows of, until [`SessionTables::follow`].
    lost: Option<ClientError>,
    /// The rows of the step under way were not pushed.
    is_left_out: bool,
}

impl SessionTables {
    /// Opens the tables beside a session that has joined without knowing which step is its last
    /// ([`SessionConfig::UNKNOWN_STEPS`](super::SessionConfig::UNKNOWN_STEPS)): the process before may have given the parameters of
    /// that step and not its rows. Call [`SessionTables::finish`] when rows and parameters have all steps.
    ///
    /// # Errors
    /// As [`AsyncTables::open`].
    pub async fn open(session: &mut AsyncSession, specs: Vec<TableSpec>) -> Result<Self, ClientError> {
        let config = session.config_without_end();
        let tables = AsyncTables::open_beside_parameters(config, specs).await?;
        Ok(Self { tables, lost: None, is_left_out: false })
    }

    /// The first step that the servers lack of this trainer, whose `session` says which parameters lack.
    #[must_use]
    pub fn next_step(&self, session: u64) -> u64 {
        self.tables.next_step().min(session)
    }

    /// Counts the times that the servers went to a checkpoint, as far as the tables know; 0 where they keep none.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.tables.epoch()
    }

    /// As [`AsyncTables::pull`]; `None` if the servers have gone to a checkpoint. The step under way does not count then:
    /// it goes on with any rows, and [`SessionTables::follow`] says which step comes next.
    ///
    /// # Errors
    /// As [`AsyncTables::pull`].
    pub async fn pull(&mut self, wanted: &[(usize, &[u64])]) -> Result<Option<Vec<Vec<f32>>>, ClientError> {
        if self.lost.is_some() {
            return Ok(None);
        }
        let pulled = self.tables.pull(wanted).await;
        self.unless_lost(pulled)
    }

    /// As [`AsyncTables::push`], by a trainer whose session began the step in `epoch`. Nothing happens if the servers have
    /// gone to a checkpoint.
    ///
    /// # Errors
    /// As [`AsyncTables::push`].
    ///
    /// # Panics
    /// As [`AsyncTables::push`].
    pub async fn push(&mut self, epoch: u64, step: u64, rows: &[RowGradients<'_>]) -> Result<(), ClientError> {
        // Rows that were opened after the servers had gone back do not know of the steps in between.
        if self.lost.is_some() || epoch != self.tables.epoch() {
            self.is_left_out = true;
            return Ok(());
        }
        let pushed = self.tables.push(step, rows).await;
        self.unless_lost(pushed).map(drop)
    }

    /// Follows the session, which has exchanged `step` and returned `following`, to where the servers are. Returns the next
    /// step to do.
    ///
    /// # Errors
    /// [`ClientError::TablesLost`] if rows were lost in a job without checkpoints; as [`AsyncTables::open`].
    pub async fn follow(&mut self, session: &AsyncSession, step: u64, following: u64) -> Result<u64, ClientError> {
        let (lost, is_left_out) = (self.lost.take(), std::mem::take(&mut self.is_left_out));
        let is_whole = lost.is_none() && !is_left_out;
        if is_whole && following == step + 1 && session.epoch() == self.tables.epoch() {
            return Ok(following);
        }
        if let Some(error) = lost.filter(|_| self.tables.epoch() == 0) {
            return Err(error);
        }
        self.tables.reopen().await?;
        Ok(self.next_step(following))
    }

    /// As [`AsyncSession::finish`], of rows and parameters.
    ///
    /// # Errors
    /// As [`AsyncSession::finish`] and [`SessionTables::follow`].
    pub async fn finish(&mut self, session: &mut AsyncSession) -> Result<u64, ClientError> {
        loop {
            let last = session.next_step();
            let following = session.try_to_finish().await?;
            let next = match last.checked_sub(1) {
                Some(step) => self.follow(session, step, following).await?,
                None => following,
            };
            if session.has_concluded() || next < last {
                return Ok(next);
            }
        }
    }

    fn unless_lost<T>(&mut self, outcome: Result<T, ClientError>) -> Result<Option<T>, ClientError> {
        match outcome {
            Err(error @ ClientError::TablesLost { .. }) => {
                self.lost = Some(error);
                Ok(None)
            }
            outcome => outcome.map(Some),
        }
    }
}
