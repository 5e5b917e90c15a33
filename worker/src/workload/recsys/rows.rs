//! The rows of the table: on the job's servers, or in this process where it trains alone.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_ps::client::{self, ClientError, Pulling, Pushing, RowGradients};
use psjobs_ps::sparse::Local;
use tch::Tensor;

/// Where the rows are.
pub enum Rows {
    Servers(client::Tables),
    Here(Local),
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

    /// Time spent waiting for servers so far.
    pub fn waiting(&self) -> Duration {
        if let Self::Servers(tables) = self { tables.waiting() } else { Duration::ZERO }
    }
}
