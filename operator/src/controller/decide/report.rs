//! Numbers of the status: pods by role, progress and final metrics.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{Checkpoint, Model, ModelMetric, Progress, RoleStatus, names};
use psjobs_api::{CheckpointResult, ReplicaResult, Role};

use super::draft::Draft;
use super::facts::Facts;
use crate::controller::checkpoint_folder::in_volume;
use crate::controller::model::ProgressReport;
use crate::controller::observe::{ObservedPod, PodPhase, Replica};

/// Entries of status.progress.metrics.
const MOST_METRICS: usize = 32;
/// Entries of status.progress.stragglers.
const MOST_STRAGGLERS: usize = 32;
/// Metrics that show the quality of a model, the best first.
const BEST_FIRST: [&str; 6] = ["accuracy", "auc", "perplexity", "reward", "test_loss", "loss"];

impl Facts<'_> {
    fn role_status(&self, role: Role) -> RoleStatus {
        let prev = if role == Role::Server { &self.prev.ps } else { &self.prev.trainer };
        let restarts = prev.as_ref().map_or(0, |prev| prev.restarts);
        let pods = || self.pods_of(role).map(|(_, pod)| pod);
        let ended_well = |pod: &&ObservedPod| matches!(pod.phase, PodPhase::Succeeded { .. });
        let own_failure = |pod: &&ObservedPod| matches!(&pod.phase, PodPhase::Failed(failure) if !failure.disruption);
        let replicas = (0..self.job.count(role)).map(|index| Replica { role, index });
        let succeeded = match role {
            Role::Server => pods().filter(ended_well).count(),
            Role::Trainer => replicas.filter(|&replica| self.history.succeeded(replica)).count(),
        };
        with_summary(
            RoleStatus {
                desired: self.job.count(role).cast_signed(),
                ready: number(pods().filter(|pod| is_ready(pod)).count()),
                active: number(pods().filter(|pod| !pod.ended()).count()),
                succeeded: number(succeeded),
                failed: number(pods().filter(own_failure).count()),
                lost: number(self.history.lost().filter(|lost| lost.role == role).count()),
                restarts: restarts.saturating_add(self.history.replaced_since(&self.before, role).cast_signed()),
                summary: String::new(),
                selector: names::selector(&self.job.name, self.job.object.spec.pod_role(role)),
                replicas: self.history.groups(role),
            },
            role,
        )
    }

    /// Returns when the step of a report was first reported.
    fn step_time(&self, report: &ProgressReport) -> Time {
        let known = self.prev.progress.as_ref().filter(|known| known.step == report.step.cast_signed());
        Time(known.and_then(|known| known.last_step_time.as_ref()).map_or(self.now, |time| time.0))
    }
}

impl Draft<'_, '_> {
    /// Counts pods and restarts into the status.
    pub(super) fn count(&mut self) {
        self.out.status.ps = Some(self.facts.role_status(Role::Server));
        self.out.status.trainer = Some(self.facts.role_status(Role::Trainer));
        let restarts = |of_role: &Option<RoleStatus>| of_role.as_ref().map_or(0, |of_role| of_role.restarts);
        self.out.status.restarts = restarts(&self.out.status.ps).saturating_add(restarts(&self.out.status.trainer));
    }

    /// Updates the numbers that still change after the end of the job: ready and active pods.
    pub(super) fn count_what_is_left(&mut self) {
        let status = &mut self.out.status;
        for (role, of_role) in [(Role::Server, &mut status.ps), (Role::Trainer, &mut status.trainer)] {
            let Some(of_role) = of_role else { continue };
            let pods =
                || self.facts.observed.pods.iter().filter(|(replica, _)| replica.role == role).map(|(_, pod)| pod);
            let ready = number(pods().filter(|pod| is_ready(pod)).count());
            let active = number(pods().filter(|pod| !pod.ended()).count());
            *of_role = with_summary(RoleStatus { ready, active, ..of_role.clone() }, role);
        }
    }

    /// Copies the report of server 0 into the status.
    pub(super) fn report_progress(&mut self) {
        if let Some(report) = &self.facts.observed.progress {
            let job = self.facts.job;
            let batch = job.object.spec.training.batch.base;
            let examples = report.total_steps.saturating_sub(report.step) * u64::from(batch);
            let seconds = (examples as f64 / report.examples_per_second).ceil();
            let known = report.total_steps > 0 && seconds.is_finite();
            let estimated_remaining_seconds = known.then_some(seconds as i64);
            let last_step_time = job.policy.deadlines.progress.map(|_| self.facts.step_time(report));
            let slow = report.stragglers.iter().take(MOST_STRAGGLERS);
            let stragglers = slow.map(|&index| names::pod(&job.name, Role::Trainer, index)).collect();
            self.out.status.progress =
                Some(Progress { estimated_remaining_seconds, last_step_time, stragglers, ..progress(report) });
            self.report_checkpoint(report.checkpoint.as_ref());
        }
    }

    /// Copies the newest checkpoint into the status; without one, the known checkpoint stays.
    fn report_checkpoint(&mut self, newest: Option<&CheckpointResult>) {
        if let Some(newest) = newest {
            let time = i64::try_from(newest.unix_seconds).ok().and_then(|at| Timestamp::from_second(at).ok());
            let (step, path) = (newest.step.cast_signed(), in_volume(self.facts.job, &newest.path));
            self.out.status.last_checkpoint = Some(Checkpoint { step, path, time: time.map(Time) });
        }
    }

    /// Copies the results of ended replicas into the status. The metrics of server 0, which are the whole job's, replace those
    /// of trainers, and these replace those of the other servers, which may be the only ones to answer. Those of a lower index
    /// replace those of a higher one.
    pub(super) fn report_results(&mut self) {
        self.report_progress();
        let known = self.out.status.progress.clone().unwrap_or_default();
        let facts = self.facts;
        let result = |replica| match &facts.pod(replica)?.phase {
            PodPhase::Succeeded { result, .. } => result.as_ref(),
            _ => None,
        };
        let server = result(Replica::server(0));
        let trainers = (0..facts.job.trainers).map(Replica::trainer).filter_map(result).collect::<Vec<_>>();
        // In an elastic job each knows what it was given, which is not all.
        let servers = if facts.job.policy.elastic.is_none() { facts.job.servers } else { 1 };
        let others = (1..servers).map(Replica::server).filter_map(result).collect::<Vec<_>>();

        let reported = known.metrics.into_iter().map(|metric| (metric.name, metric.value));
        let mut metrics = reported.collect::<BTreeMap<_, _>>();
        for result in others.iter().rev().chain(trainers.iter().rev()).copied().chain(server) {
            metrics.extend(result.metrics.clone());
        }
        let of_others = || {
            let of_trainers = trainers.iter().map(|result| result.steps).sum();
            others.iter().map(|result| result.steps).fold(of_trainers, u64::max)
        };
        let step = server.map_or_else(of_others, |result| result.steps).max(known.step.unsigned_abs());
        let speed = server.filter(|result| result.seconds > 0.0);
        let speed = speed.map(|ReplicaResult { examples, seconds, .. }| *examples as f64 / seconds);
        let report = ProgressReport {
            step,
            total_steps: step,
            examples_per_second: speed.or(known.examples_per_second).unwrap_or(0.0),
            metrics,
            ..ProgressReport::default()
        };
        if let Some(result) = server {
            self.report_checkpoint(result.checkpoint.as_ref());
            let model = |path: &String| Model { path: in_volume(facts.job, path), metric: quality(&report.metrics) };
            self.out.status.model = result.model.as_ref().map(model).or(self.out.status.model.take());
        }
        let progress = progress(&report);
        self.out.status.progress =
            Some(Progress { percent: 100, summary: "100%".into(), estimated_remaining_seconds: None, ..progress });
    }
}

fn progress(report: &ProgressReport) -> Progress {
    let ProgressReport { step, total_steps, examples_per_second, ref metrics, .. } = *report;
    let percent = (step.min(total_steps) * 100).checked_div(total_steps);
    // JSON has no number for a diverged loss.
    let finite = metrics.iter().filter(|(_, value)| value.is_finite());
    let metrics = finite.map(|(name, &value)| ModelMetric { name: name.clone(), value }).take(MOST_METRICS).collect();
    Progress {
        step: step.cast_signed(),
        total_steps: total_steps.cast_signed(),
        percent: percent.unwrap_or(0) as i32,
        summary: percent.map_or_else(|| format!("{step} steps"), |percent| format!("{percent}%")),
        examples_per_second: (examples_per_second > 0.0 && examples_per_second.is_finite())
            .then(|| (examples_per_second * 10.0).round() / 10.0),
        estimated_remaining_seconds: None,
        last_step_time: None,
        metrics,
        stragglers: Vec::new(),
    }
}

/// Returns the metric that shows the quality of a model best.
fn quality(metrics: &BTreeMap<String, f64>) -> Option<ModelMetric> {
    let is_finite = |name: &&str| metrics.get(*name).is_some_and(|value| value.is_finite());
    let name = BEST_FIRST.into_iter().find(is_finite)?;
    Some(ModelMetric { name: name.to_owned(), value: metrics[name] })
}

/// Returns whether a pod runs and passes its probes.
fn is_ready(pod: &ObservedPod) -> bool {
    pod.ready && pod.phase == PodPhase::Running && pod.deletion_deadline.is_none()
}

/// Adds the summary, for example `1/2`. A trainer whose work is done counts as ready.
fn with_summary(mut of_role: RoleStatus, role: Role) -> RoleStatus {
    let done = if role == Role::Trainer { of_role.succeeded } else { 0 };
    of_role.summary = format!("{}/{}", (of_role.ready + done).min(of_role.desired), of_role.desired);
    of_role
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
