//! The rows of the table: on the job's servers, or in this process where it trains alone. Where the servers keep
//! checkpoints, these hold the dense layers too, and both go back together.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_ps::client::{self, ClientError, Pulling, Pushing, RowGradients};
use psjobs_ps::sparse::Local;
use tch::Tensor;

use psjobs_worker::train::replicated_layers::ReplicatedLayers;

/// Where the rows are.
pub enum Rows {
    Servers(client::Tables),
    Here(Box<Local>),
}

/// The dense layers as they began, for a job that goes back to its beginning; nothing where none can.
pub struct Beginning(Vec<f32>);

impl Beginning {
    pub fn of(dense: &ReplicatedLayers, rows: &Rows) -> Self {
        Self(if rows.can_go_back() { dense.state() } else { Vec::new() })
    }
}

/// Rows on their way, or none where they need not travel.
pub type Coming = Option<Pulling>;

impl Rows {
    /// Asks for the rows of keys.
    pub fn begin_pull(&self, keys: &[u64]) -> Coming {
        if let Self::Servers(tables) = self { Some(tables.begin_pull(&[(0, keys)])) } else { None }
    }

    /// The vectors of keys, `[k, width]`.
    pub fn pulled(&mut self, coming: Coming, keys: &[u64]) -> Result<Tensor, ClientError> {
        let rows = match (self, coming) {
            (Self::Servers(tables), Some(pulling)) => tables.pulled(pulling)?.pop().unwrap_or_default(),
            (Self::Servers(tables), None) => tables.pull(&[(0, keys)])?.pop().unwrap_or_default(),
            (Self::Here(table), _) => table.pull(0, keys),
        };
        Ok(Tensor::from_slice(&rows).view([keys.len() as i64, -1]))
    }

    /// Sends the gradient of keys' rows; what is still to be waited for.
    pub fn begin_push(&mut self, step: u64, keys: &[u64], gradient: &Tensor) -> Option<Pushing> {
        let mut values = vec![0.0; gradient.numel()];
        gradient.copy_data(&mut values, gradient.numel());
        match self {
            Self::Servers(tables) => Some(tables.begin_push(step, &[RowGradients { table: 0, keys, values: &values }])),
            Self::Here(table) => {
                table.push(step, 0, keys, &values);
                None
            }
        }
    }

    /// Waits until the consistency rule lets this trainer go on, or another trainer is `lost`, whose gradients
    /// the rule may wait for in vain.
    pub fn pushed(&mut self, pushing: Option<Pushing>, lost: &AtomicBool) -> Result<(), ClientError> {
        match (self, pushing) {
            (Self::Servers(tables), Some(pushing)) => tables.pushed_unless(pushing, lost),
            _ => Ok(()),
        }
    }

    /// Counts the times that the servers went to a checkpoint; 0 where there are none.
    pub fn epoch(&self) -> u64 {
        if let Self::Servers(tables) = self { tables.epoch() } else { 0 }
    }

    /// Returns true if the servers keep checkpoints, to which this trainer can go back with them.
    pub fn can_go_back(&self) -> bool {
        self.epoch() > 0
    }

    /// Where the servers are, who may have gone to a checkpoint since this trainer was to do step `next`: the step to
    /// do, and the dense layers as they were before it.
    pub fn follow(
        &mut self,
        dense: &mut ReplicatedLayers,
        beginning: &Beginning,
        next: u64,
    ) -> Result<u64, ClientError> {
        let before = self.epoch();
        let Self::Servers(tables) = self else { return Ok(next) };
        if before == 0 {
            return Ok(next);
        }
        loop {
            tables.reopen()?;
            if tables.epoch() == before {
                return Ok(next);
            }
            tracing::info!(step = tables.next_step(), "the servers have gone to a checkpoint; going on from there");
            match resume(tables, dense, beginning) {
                Err(ClientError::TablesLost { .. }) => {}
                resumed => return resumed,
            }
        }
    }

    /// Takes the dense layers that the servers keep, where this trainer's are not those of the step that comes, which it
    /// returns.
    pub fn resume(&mut self, dense: &mut ReplicatedLayers, beginning: &Beginning) -> Result<u64, ClientError> {
        if let Self::Servers(tables) = self { resume(tables, dense, beginning) } else { Ok(0) }
    }

    /// Gives the dense layers to the servers, if a checkpoint wants them after `steps`, or `now`.
    pub fn keep(&mut self, dense: &ReplicatedLayers, steps: u64, now: bool) -> Result<(), ClientError> {
        match self {
            Self::Servers(tables) if tables.epoch() > 0 && (now || tables.wants_layers(steps)) => {
                tables.keep(&dense.layers(steps))
            }
            _ => Ok(()),
        }
    }

    /// As [`Rows::keep`], by a trainer that must stop. It does not try for long.
    pub fn keep_at_stop(&mut self, dense: &ReplicatedLayers, steps: u64) {
        match self {
            Self::Servers(tables) if tables.epoch() > 0 => tables.keep_at_stop(&dense.layers(steps)),
            _ => {}
        }
    }

    /// Waits until every step that was given is in a checkpoint; false if the servers went to one without.
    pub fn conclude(&mut self) -> Result<bool, ClientError> {
        match self {
            Self::Servers(tables) if tables.epoch() > 0 => tables.conclude(),
            _ => Ok(true),
        }
    }

    /// Time spent waiting for servers so far.
    pub fn waiting(&self) -> Duration {
        if let Self::Servers(tables) = self { tables.waiting() } else { Duration::ZERO }
    }
}

fn resume(
    tables: &mut client::Tables,
    dense: &mut ReplicatedLayers,
    beginning: &Beginning,
) -> Result<u64, ClientError> {
    if dense.updates() == tables.next_step() || tables.epoch() == 0 {
        return Ok(tables.next_step());
    }
    let kept = tables.kept()?;
    let next = tables.next_step();
    match kept.filter(|kept| kept.state.len() == dense.state_len()) {
        Some(kept) => {
            if kept.steps != next {
                tracing::warn!(
                    layers = kept.steps,
                    rows = next,
                    "the dense layers and the rows are of different steps"
                );
            }
            dense.take(&kept.state, kept.updates, kept.steps);
        }
        None => dense.take(&beginning.0, 0, 0),
    }
    Ok(next)
}
