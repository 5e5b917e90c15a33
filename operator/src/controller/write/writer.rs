//! The client of all writes, and their permits.

use std::sync::Arc;

use kube::Client;

use super::write_priority::{Permit, PriorityLimiter, WritePriority};
use crate::metrics::Metrics;

/// Requests of one job under way at once.
pub const REQUESTS_OF_JOB: usize = 32;

/// Sends writes to the API server in the order of their priority.
pub struct Writer {
    pub client: Client,
    limiter: Arc<PriorityLimiter>,
    metrics: Metrics,
}

impl Writer {
    pub fn new(client: Client, limiter: Arc<PriorityLimiter>, metrics: Metrics) -> Self {
        Self { client, limiter, metrics }
    }

    /// Waits for the permit to write, and counts the wait in the metrics.
    pub async fn permit(&self, write: WritePriority) -> Permit<'_> {
        self.metrics.write_waits(1);
        let permit = self.limiter.permit(write).await;
        self.metrics.write_waits(-1);
        permit
    }

    /// Returns the permit to write if no wait is needed.
    pub fn try_permit(&self, write: WritePriority) -> Option<Permit<'_>> {
        self.limiter.try_permit(write)
    }
}
