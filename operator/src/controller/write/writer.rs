//! The client of all writes, and their permits.

use std::sync::Arc;
use std::time::Instant;

use kube::Client;

use super::write_priority::{Permit, PriorityLimiter, WritePriority};
use crate::controller::error::ReconcileError;
use crate::lease::Tenure;
use crate::metrics::Metrics;

/// Requests of one job under way at once.
pub const REQUESTS_OF_JOB: usize = 32;

/// Sends writes to the API server in the order of their priority.
pub struct Writer {
    pub client: Client,
    limiter: Arc<PriorityLimiter>,
    metrics: Metrics,
    tenure: Arc<Tenure>,
}

impl Writer {
    pub fn new(client: Client, limiter: Arc<PriorityLimiter>, metrics: Metrics, tenure: Arc<Tenure>) -> Self {
        Self { client, limiter, metrics, tenure }
    }

    /// Waits for the permit to write, and counts the wait in the metrics.
    ///
    /// # Errors
    /// If another operator may lead by then.
    pub async fn permit(&self, write: WritePriority) -> Result<Permit<'_>, ReconcileError> {
        self.metrics.write_waits(1);
        let permit = self.limiter.permit(write).await;
        self.metrics.write_waits(-1);
        self.check_tenure().map(|()| permit)
    }

    /// Returns the permit to write if no wait is needed.
    ///
    /// # Errors
    /// As [`Writer::permit`].
    pub fn try_permit(&self, write: WritePriority) -> Result<Option<Permit<'_>>, ReconcileError> {
        let permit = self.limiter.try_permit(write);
        self.check_tenure().map(|()| permit)
    }

    /// Refuses to write while it is not certain that this operator leads.
    ///
    /// # Errors
    /// If another operator may lead.
    pub fn check_tenure(&self) -> Result<(), ReconcileError> {
        if self.tenure.holds(Instant::now()) { Ok(()) } else { Err(ReconcileError::NotLeading) }
    }

    /// Returns true if caches may be behind, because requests failed a short time ago.
    pub fn caches_may_be_behind(&self) -> bool {
        self.tenure.caches_may_be_behind(Instant::now())
    }
}
