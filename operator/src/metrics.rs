//! The operator's own metrics, in the text format of Prometheus.

use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use psjobs_api::crd::{ParameterServerJob, Phase};

/// Handles to all metrics; clones count into the same ones.
#[derive(Clone)]
pub struct Metrics {
    reconciles: Family<ResultLabels, Histogram, fn() -> Histogram>,
    children: Family<ChildLabels, Counter>,
    status_writes: Counter,
    jobs: Family<JobLabels, Gauge>,
    leader: Gauge,
    progress_polls: Family<ResultLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ChildLabels {
    action: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JobLabels {
    phase: String,
}

/// A reconcile under way.
pub struct Timer<'a> {
    metrics: &'a Metrics,
    start: Instant,
}

impl Metrics {
    /// Makes the metrics and enters them into `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 14));
        let metrics = Self {
            reconciles: Family::new_with_constructor(histogram),
            children: Family::default(),
            status_writes: Counter::default(),
            jobs: Family::default(),
            leader: Gauge::default(),
            progress_polls: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix("psjobs");
        registry.register("reconcile_seconds", "Time of one reconcile", metrics.reconciles.clone());
        registry.register("children", "Services and pods created, refused and deleted", metrics.children.clone());
        registry.register("status_writes", "Statuses written", metrics.status_writes.clone());
        registry.register("jobs", "Jobs by phase", metrics.jobs.clone());
        registry.register("leader", "1 while this operator leads", metrics.leader.clone());
        registry.register("progress_polls", "Questions to servers about progress", metrics.progress_polls.clone());
        metrics
    }

    pub fn start_reconcile(&self) -> Timer<'_> {
        Timer { metrics: self, start: Instant::now() }
    }

    pub fn created(&self, created: usize, refused: usize) {
        self.child("created", created);
        self.child("refused", refused);
    }

    pub fn deleted(&self, pods: usize) {
        self.child("deleted", pods);
    }

    fn child(&self, action: &'static str, count: usize) {
        self.children.get_or_create(&ChildLabels { action }).inc_by(count as u64);
    }

    pub fn wrote_status(&self) {
        self.status_writes.inc();
    }

    pub fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    pub fn polled(&self, answered: bool) {
        self.progress_polls.get_or_create(&outcome(answered)).inc();
    }

    /// Counts the jobs of the cache by phase.
    pub fn count_jobs<'a>(&self, jobs: impl Iterator<Item = &'a ParameterServerJob> + Clone) {
        use Phase::{Completing, Failed, Pending, Restarting, Running, Succeeded, Suspended};
        for phase in [Pending, Running, Restarting, Suspended, Completing, Succeeded, Failed] {
            let of_phase = |job: &&ParameterServerJob| {
                job.status.as_ref().and_then(|status| status.phase).unwrap_or(Pending) == phase
            };
            let count = jobs.clone().filter(of_phase).count();
            self.jobs.get_or_create(&JobLabels { phase: format!("{phase:?}") }).set(count as i64);
        }
    }
}

impl Timer<'_> {
    pub fn stop(self, success: bool) {
        let elapsed: Duration = self.start.elapsed();
        self.metrics.reconciles.get_or_create(&outcome(success)).observe(elapsed.as_secs_f64());
    }
}

fn outcome(success: bool) -> ResultLabels {
    ResultLabels { result: if success { "success" } else { "failure" } }
}

/// The answer to `GET /metrics`.
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("a String takes all text");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_told_in_the_text_format() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        metrics.start_reconcile().stop(true);
        metrics.created(3, 1);
        metrics.leads(true);
        metrics.count_jobs(std::iter::empty());
        let text = text(&registry);
        for line in [
            "psjobs_reconcile_seconds_count{result=\"success\"} 1",
            "psjobs_children_total{action=\"refused\"} 1",
            "psjobs_leader 1",
            "psjobs_jobs{phase=\"Running\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
