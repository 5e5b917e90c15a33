//! State and handles that all reconciles share.

use std::sync::Arc;

use kube::Client;
use tracing::Instrument as _;

use super::cache::job_state::Memory;
use super::cache::observed_state::Children;
use super::error::ReconcileError;
use super::shard::Shard;
use super::write::events::Teller;
use super::write::write_priority::{Turn, Turns, Write};
use crate::metrics::Metrics;
use crate::traces;

/// State and handles that all reconciles share.
pub struct Context {
    pub client: Client,
    pub children: Children,
    pub memory: Arc<Memory>,
    pub teller: Teller,
    pub metrics: Metrics,
    pub turns: Arc<Turns>,
    pub shard: Shard,
    /// Image of servers whose job has no template for them.
    pub worker_image: String,
}

impl Context {
    /// Waits until a write of this kind may be sent.
    pub async fn turn(&self, write: Write) -> Turn<'_> {
        self.metrics.write_waits(1);
        let turn = self.turns.turn(write).await;
        self.metrics.write_waits(-1);
        turn
    }

    /// Measures a step of the reconcile, which is a span of its trace.
    pub async fn step<T>(
        &self,
        name: &'static str,
        work: impl Future<Output = Result<T, ReconcileError>>,
    ) -> Result<T, ReconcileError> {
        let span = traces::step(name);
        let result = self.metrics.step(name, work.instrument(span.clone())).await;
        traces::end(&span, &result);
        result
    }
}
