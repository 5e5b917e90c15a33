//! The settings of a trainer.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_api::Training;
use psjobs_ps::sparse::TableSpec;
use psjobs_worker::train::Plan;

/// How a trainer trains.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub table: TableSpec,
    /// Units of the lower and of the upper layers, without the vector and the score.
    pub layers: (Vec<i64>, Vec<i64>),
    pub training: Training,
    /// How long a server or another trainer may stay away.
    pub connect_timeout: Duration,
    /// Set to end whatever is waited for.
    pub interrupt: Arc<AtomicBool>,
}
