//! The numbers of the status: pods by role, progress and final metrics.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{Checkpoint, Model, ModelMetric, Progress, RoleStatus, names};
use psjobs_api::{CheckpointResult, ReplicaResult, Role};

use super::{Draft, ProgressReport};
use crate::controller::build::in_volume;
use crate::controller::observe::{Life, ObservedPod, Replica};

/// Entries of status.progress.metrics.
const MOST_METRICS: usize = 32;
/// Entries of status.progress.stragglers.
const MOST_STRAGGLERS: usize = 32;
/// Metrics that a model is judged by.
const BEST_FIRST: [&str; 6] = ["accuracy", "auc", "perplexity", "reward", "test_loss", "loss"];

impl Draft<'_> {
    /// Counts pods and restarts into the status.
    pub(super) fn count(&mut self) {
        self.out.status.ps = Some(self.role_status(Role::Server));
        self.out.status.trainer = Some(self.role_status(Role::Trainer));
        let restarts = |of_role: &Option<RoleStatus>| of_role.as_ref().map_or(0, |of_role| of_role.restarts);
        self.out.status.restarts = restarts(&self.out.status.ps) + restarts(&self.out.status.trainer);
    }

    fn role_status(&self, role: Role) -> RoleStatus {
        let prev = if role == Role::Server { &self.prev.ps } else { &self.prev.trainer };
        let restarts = prev.as_ref().map_or(0, |prev| prev.restarts);
        let pods = || self.pods_of(role).map(|(_, pod)| pod);
        let ended_well = |pod: &&ObservedPod| matches!(pod.life, Life::Succeeded { .. });
        let own_failure = |pod: &&ObservedPod| matches!(&pod.life, Life::Failed(failure) if !failure.disruption);
        let replicas = (0..self.job.count(role)).map(|index| Replica { role, index });
        let succeeded = match role {
            Role::Server => pods().filter(ended_well).count(),
            Role::Trainer => replicas.filter(|&replica| self.ledger.succeeded(replica)).count(),
        };
        with_summary(
            RoleStatus {
                desired: self.job.count(role).cast_signed(),
                ready: number(pods().filter(|pod| is_ready(pod)).count()),
                active: number(pods().filter(|pod| !pod.ended()).count()),
                succeeded: number(succeeded),
                failed: number(pods().filter(own_failure).count()),
                lost: number(self.ledger.lost().filter(|lost| lost.role == role).count()),
                restarts: restarts + self.ledger.replaced_since(&self.before, role).cast_signed(),
                summary: String::new(),
                selector: names::selector(&self.job.name, role),
                replicas: self.ledger.groups(role),
            },
            role,
        )
    }

    /// After the end, only what still runs changes.
    pub(super) fn count_what_is_left(&mut self) {
        let status = &mut self.out.status;
        for (role, of_role) in [(Role::Server, &mut status.ps), (Role::Trainer, &mut status.trainer)] {
            let Some(of_role) = of_role else { continue };
            let pods = || self.world.pods.iter().filter(|(replica, _)| replica.role == role).map(|(_, pod)| pod);
            let ready = number(pods().filter(|pod| is_ready(pod)).count());
            let active = number(pods().filter(|pod| !pod.ended()).count());
            *of_role = with_summary(RoleStatus { ready, active, ..of_role.clone() }, role);
        }
    }

    /// Takes over what server 0 told.
    pub(super) fn report_progress(&mut self) {
        if let Some(report) = &self.world.progress {
            let batch = self.job.object.spec.training.batch.base;
            let examples = report.total_steps.saturating_sub(report.step) * u64::from(batch);
            let seconds = (examples as f64 / report.examples_per_second).ceil();
            let known = report.total_steps > 0 && seconds.is_finite();
            let estimated_remaining_seconds = known.then_some(seconds as i64);
            let last_step_time = self.job.policy.deadlines.progress.and_then(|_| self.step_time(report));
            let slow = report.stragglers.iter().take(MOST_STRAGGLERS);
            let stragglers = slow.map(|&index| names::pod(&self.job.name, Role::Trainer, index)).collect();
            self.out.status.progress =
                Some(Progress { estimated_remaining_seconds, last_step_time, stragglers, ..progress(report) });
            self.report_checkpoint(report.checkpoint.as_ref());
        }
    }

    /// Takes over the newest checkpoint; one that is known stays until there is another.
    fn report_checkpoint(&mut self, newest: Option<&CheckpointResult>) {
        if let Some(newest) = newest {
            let time = i64::try_from(newest.unix_seconds).ok().and_then(|at| Timestamp::from_second(at).ok());
            let (step, path) = (newest.step.cast_signed(), in_volume(self.job, &newest.path));
            self.out.status.last_checkpoint = Some(Checkpoint { step, path, time: time.map(Time) });
        }
    }

    /// When the step that a report tells was first told.
    fn step_time(&self, report: &ProgressReport) -> Option<Time> {
        let known = self.prev.progress.as_ref().filter(|known| known.step == report.step.cast_signed());
        known.map_or_else(|| self.time(), |known| known.last_step_time.clone().or(self.time()))
    }

    /// Takes over what the replicas left behind when they ended: server 0 speaks for the whole job,
    /// the trainers for themselves, the lowest index first.
    pub(super) fn report_results(&mut self) {
        self.report_progress();
        let known = self.out.status.progress.clone().unwrap_or_default();
        let result = |replica| match &self.pod(replica)?.life {
            Life::Succeeded { result, .. } => result.as_ref(),
            _ => None,
        };
        let server = result(Replica::server(0));
        let trainers = (0..self.job.trainers).map(Replica::trainer).filter_map(result).collect::<Vec<_>>();

        let told = known.metrics.into_iter().map(|metric| (metric.name, metric.value));
        let mut metrics = told.collect::<BTreeMap<_, _>>();
        for result in trainers.iter().rev().copied().chain(server) {
            metrics.extend(result.metrics.clone());
        }
        let steps = server.map_or_else(|| trainers.iter().map(|result| result.steps).sum(), |result| result.steps);
        let step = steps.max(known.step.unsigned_abs());
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
            let model = |path: &String| Model { path: in_volume(self.job, path), metric: quality(&report.metrics) };
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
    // A diverged loss is no number that JSON could hold.
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

/// The metric that tells best how good a model is.
fn quality(metrics: &BTreeMap<String, f64>) -> Option<ModelMetric> {
    let told = |name: &&str| metrics.get(*name).is_some_and(|value| value.is_finite());
    let name = BEST_FIRST.into_iter().find(told)?;
    Some(ModelMetric { name: name.to_owned(), value: metrics[name] })
}

/// A pod that still runs and passes its probes.
fn is_ready(pod: &ObservedPod) -> bool {
    pod.ready && pod.life == Life::Running && pod.gone_by.is_none()
}

/// `1/2`; a trainer whose work is done counts as there.
fn with_summary(mut of_role: RoleStatus, role: Role) -> RoleStatus {
    let done = if role == Role::Trainer { of_role.succeeded } else { 0 };
    of_role.summary = format!("{}/{}", (of_role.ready + done).min(of_role.desired), of_role.desired);
    of_role
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
