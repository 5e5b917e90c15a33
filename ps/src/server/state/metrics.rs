//! Counters of the data plane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::block::BlockMetrics;

/// Counters of the data plane.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(in crate::server) gradients: AtomicU64,
    pub(in crate::server) gradient_bytes: AtomicU64,
    /// Metrics of the blocks.
    pub blocks: Arc<BlockMetrics>,
}

impl Metrics {
    /// Counts one gradient block.
    pub fn gradient(&self, bytes: usize) {
        self.gradients.fetch_add(1, Relaxed);
        self.gradient_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Updates in each bucket of the staleness' histogram; none if nothing was stale or could be.
    pub fn staleness_counts(&self) -> Vec<u64> {
        let histogram = self.blocks.staleness();
        if histogram.total() > 0 { histogram.counts().to_vec() } else { Vec::new() }
    }
}
