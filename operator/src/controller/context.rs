//! State and handles that all reconciles share.

use std::sync::Arc;

use tracing::Instrument as _;

use super::cache::job_state::JobStates;
use super::cache::observed_state::ChildCaches;
use super::error::ReconcileError;
use super::shard::Shard;
use super::write::events::EventRecorder;
use super::write::writer::Writer;
use crate::metrics::Metrics;
use crate::traces;

/// State and handles that all reconciles share.
pub struct Context {
    pub writer: Writer,
    pub children: ChildCaches,
    pub jobs: Arc<JobStates>,
    pub events: EventRecorder,
    pub metrics: Metrics,
    pub shard: Shard,
    /// Image of servers whose job has no template for them.
    pub worker_image: String,
}

impl Context {
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
