//! The operator's own metrics, in the text format of Prometheus.

use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use psjobs_api::crd::{ConditionType, ParameterServerJob, ParameterServerJobStatus, Phase};

use crate::conditions;

/// Handles to all metrics. Clones count into the same metrics.
#[derive(Clone)]
pub struct Metrics {
    reconciles: Family<ResultLabels, Histogram, fn() -> Histogram>,
    steps: Family<StepLabels, Histogram, fn() -> Histogram>,
    milestones: Family<MilestoneLabels, Histogram, fn() -> Histogram>,
    restarts: Family<ReasonLabels, Counter>,
    writes_waiting: Gauge,
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
struct StepLabels {
    step: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MilestoneLabels {
    milestone: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
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
    /// Creates the metrics and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 14));
        let long: fn() -> Histogram = || Histogram::new(exponential_buckets(0.05, 2.0, 20));
        let metrics = Self {
            reconciles: Family::new_with_constructor(histogram),
            steps: Family::new_with_constructor(histogram),
            milestones: Family::new_with_constructor(long),
            restarts: Family::default(),
            writes_waiting: Gauge::default(),
            children: Family::default(),
            status_writes: Counter::default(),
            jobs: Family::default(),
            leader: Gauge::default(),
            progress_polls: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix("psjobs");
        registry.register("reconcile_seconds", "Time of one reconcile", metrics.reconciles.clone());
        registry.register("reconcile_step_seconds", "Time of one step of a reconcile", metrics.steps.clone());
        registry.register(
            "job_milestone_seconds",
            "Time from a job's start until its pods exist, until it runs, until it has succeeded",
            metrics.milestones.clone(),
        );
        registry.register("restarts", "Pods started again, by what happened to the job", metrics.restarts.clone());
        registry.register("writes_waiting", "Writes that wait for their turn", metrics.writes_waiting.clone());
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

    /// Measures a step of the reconcile.
    pub async fn step<T>(&self, step: &'static str, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let result = work.await;
        self.steps.get_or_create(&StepLabels { step }).observe(start.elapsed().as_secs_f64());
        result
    }

    /// Counts a written status, the milestones that the job has passed with it, and the new restarts.
    pub fn wrote(&self, before: &ParameterServerJobStatus, now: &ParameterServerJobStatus) {
        self.status_writes.inc();
        for (milestone, seconds) in milestones(before, now) {
            self.milestones.get_or_create(&MilestoneLabels { milestone }).observe(seconds);
        }
        let restarts = u64::try_from(now.restarts - before.restarts).unwrap_or(0);
        if restarts > 0 {
            self.restarts.get_or_create(&ReasonLabels { reason: restart_reason(now) }).inc_by(restarts);
        }
    }

    /// Adds to the number of writes that wait for a permit.
    pub fn write_waits(&self, more: i64) {
        self.writes_waiting.inc_by(more);
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

    pub fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    pub fn polled(&self, answered: bool) {
        self.progress_polls.get_or_create(&outcome(answered)).inc();
    }

    /// Counts the jobs of the cache by phase.
    pub fn count_jobs<'a>(&self, jobs: impl Iterator<Item = &'a ParameterServerJob> + Clone) {
        use Phase::{Completing, Failed, Pending, Restarting, Running, Stalled, Succeeded, Suspended};
        for phase in [Pending, Running, Restarting, Stalled, Suspended, Completing, Succeeded, Failed] {
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

/// Returns the milestones that the job passed between two statuses, in seconds from its start.
fn milestones(before: &ParameterServerJobStatus, now: &ParameterServerJobStatus) -> Vec<(&'static str, f64)> {
    let Some(start) = &now.start_time else { return Vec::new() };
    let rows = [
        ("pods", ConditionType::Created),
        ("running", ConditionType::Running),
        ("succeeded", ConditionType::Succeeded),
    ];
    let first = rows.into_iter().filter_map(|(milestone, type_)| {
        let at = conditions::since(now, type_)?;
        // A job that runs again after a restart was Running before: its condition is no milestone.
        let again = conditions::find(before, type_).is_some_and(|known| known.last_transition_time.0 > start.0);
        let seconds = at.duration_since(start.0).as_secs_f64();
        (conditions::since(before, type_).is_none() && !again).then_some((milestone, seconds))
    });
    first.collect()
}

/// Returns the reason of a restart as one of a few words, because container runtimes invent reasons and each would be
/// another time series.
fn restart_reason(status: &ParameterServerJobStatus) -> &'static str {
    const KNOWN: [&str; 10] = [
        "Error",
        "OOMKilled",
        "Evicted",
        "PreemptionByScheduler",
        "PodDeleted",
        "PodLost",
        "NodeLost",
        "NodeRestarted",
        "Stalled",
        "EndedEarly",
    ];
    let reason = conditions::find(status, ConditionType::Restarting).map(|restarting| restarting.reason.as_str());
    KNOWN.into_iter().find(|known| Some(*known) == reason).unwrap_or("Other")
}

fn outcome(success: bool) -> ResultLabels {
    ResultLabels { result: if success { "success" } else { "failure" } }
}

/// Formats the answer to `GET /metrics`.
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("a String takes all text");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jobs_milestones_are_passed_once() {
        use jiff::Timestamp;
        use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

        let at = |second| Timestamp::from_second(second).expect("in range");
        let begin = ParameterServerJobStatus { start_time: Some(Time(at(10))), ..Default::default() };
        let with = |status: &ParameterServerJobStatus, type_, holds, second| {
            let mut status = status.clone();
            let update = if holds {
                conditions::ConditionUpdate::yes("R", "")
            } else {
                conditions::ConditionUpdate::no("R", "")
            };
            conditions::set(&mut status, type_, update, at(second));
            status
        };
        let created = with(&begin, ConditionType::Created, true, 12);
        assert_eq!(milestones(&begin, &created), [("pods", 2.0)]);
        let waiting = with(&created, ConditionType::Running, false, 10);
        let running = with(&waiting, ConditionType::Running, true, 15);
        assert_eq!(milestones(&waiting, &running), [("running", 5.0)]);
        let lost = with(&running, ConditionType::Running, false, 20);
        assert_eq!(milestones(&lost, &with(&lost, ConditionType::Running, true, 25)), []);
        assert_eq!(milestones(&running, &with(&running, ConditionType::Succeeded, true, 40)), [("succeeded", 30.0)]);
    }

    #[test]
    fn restarts_are_counted_by_few_reasons() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        for (reason, restarts) in [("OOMKilled", 1), ("ContainerInvented42", 2)] {
            let mut now = ParameterServerJobStatus { restarts, ..Default::default() };
            conditions::set(
                &mut now,
                ConditionType::Restarting,
                conditions::ConditionUpdate::yes(reason, ""),
                jiff::Timestamp::UNIX_EPOCH,
            );
            metrics.wrote(&ParameterServerJobStatus::default(), &now);
        }
        let text = text(&registry);
        assert!(text.contains("psjobs_restarts_total{reason=\"OOMKilled\"} 1"), "{text}");
        assert!(text.contains("psjobs_restarts_total{reason=\"Other\"} 2"), "{text}");
    }

    #[test]
    fn what_happened_is_reported_in_the_text_format() {
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
