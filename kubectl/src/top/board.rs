//! The knowledge that `top` draws: the newest state of the job, its pods and events, and the metrics since it began. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::runtime::watcher::{Error, Event};
use psjobs_api::Role;
use psjobs_api::crd::names::{LABEL_INDEX, LABEL_ROLE};
use psjobs_api::crd::{ParameterServerJob, Progress};

use crate::programs::programs;
use crate::text;

/// Points of a curve; beyond that every second one goes.
const POINTS: usize = 2_000;

/// All that is shown of a job.
pub struct Board {
    pub job: ParameterServerJob,
    /// The job is no longer there.
    pub is_deleted: bool,
    /// When the curves begin.
    pub since: Timestamp,
    /// The last words of a cluster that does not answer.
    pub trouble: Option<String>,
    curves: BTreeMap<String, Vec<(f64, f64)>>,
    /// Name of the metric that is shown, if a key has chosen one.
    chosen: Option<String>,
    /// By role, index and name.
    pods: BTreeMap<(Role, u32, String), Pod>,
    /// By uid.
    events: BTreeMap<String, KubernetesEvent>,
}

/// A pod in a line.
#[derive(Debug, PartialEq, Eq)]
pub struct PodLine {
    pub process: String,
    pub state: String,
    pub node: String,
    pub age: String,
    /// Clearly slower than the other trainers.
    pub is_slow: bool,
    pub is_well: bool,
}

/// An event in a line.
#[derive(Debug, PartialEq, Eq)]
pub struct EventLine {
    pub age: String,
    pub reason: String,
    pub message: String,
    pub is_warning: bool,
}

impl Board {
    pub fn new(job: ParameterServerJob, now: Timestamp) -> Self {
        let (curves, chosen, pods, events) = Default::default();
        let mut board = Self { job, is_deleted: false, since: now, trouble: None, curves, chosen, pods, events };
        board.note_metrics();
        board
    }

    /// Records what a watch says of the job.
    pub fn see_job(&mut self, seen: Result<Event<ParameterServerJob>, Error>, now: Timestamp) {
        let Some(event) = self.answered(seen) else { return };
        match event {
            Event::Apply(job) | Event::InitApply(job) => {
                // Another job of the name: its curves begin anew.
                if job.metadata.uid != self.job.metadata.uid {
                    (self.curves, self.since) = (BTreeMap::new(), now);
                }
                (self.job, self.is_deleted) = (job, false);
                self.note_metrics();
            }
            Event::Delete(_) => self.is_deleted = true,
            Event::Init | Event::InitDone => {}
        }
    }

    /// Records what a watch says of its pods.
    pub fn see_pod(&mut self, seen: Result<Event<Pod>, Error>) {
        let Some(event) = self.answered(seen) else { return };
        match event {
            Event::Apply(pod) | Event::InitApply(pod) => {
                let placed = programs(pod).into_iter().filter_map(|program| Some((place(&program)?, program)));
                self.pods.extend(placed);
            }
            Event::Delete(pod) => {
                let places = programs(pod).into_iter().filter_map(|program| place(&program));
                places.for_each(|place| drop(self.pods.remove(&place)));
            }
            Event::Init => self.pods.clear(),
            Event::InitDone => {}
        }
    }

    /// Records what a watch says of its events.
    pub fn see_event(&mut self, seen: Result<Event<KubernetesEvent>, Error>) {
        let uid = |event: &KubernetesEvent| event.metadata.uid.clone();
        let Some(event) = self.answered(seen) else { return };
        match event {
            Event::Apply(event) | Event::InitApply(event) => {
                drop(uid(&event).map(|uid| self.events.insert(uid, event)));
            }
            // Kubernetes forgets events after an hour.
            Event::Delete(event) => drop(uid(&event).map(|uid| self.events.remove(&uid))),
            Event::Init => self.events.clear(),
            Event::InitDone => {}
        }
    }

    fn answered<T>(&mut self, seen: Result<T, Error>) -> Option<T> {
        match seen {
            Ok(event) => {
                self.trouble = None;
                Some(event)
            }
            Err(error) => {
                self.trouble = Some(error.to_string());
                None
            }
        }
    }

    fn note_metrics(&mut self) {
        let Some(progress) = self.progress().cloned() else { return };
        let rate = progress.examples_per_second.map(|rate| ("examples/s".to_owned(), rate));
        let metrics = progress.metrics.iter().map(|metric| (metric.name.clone(), metric.value));
        for (name, value) in metrics.chain(rate).filter(|(_, value)| value.is_finite()) {
            let (curve, step) = (self.curves.entry(name).or_default(), progress.step as f64);
            // A job that goes back to a checkpoint does steps again.
            curve.retain(|(before, _)| *before < step);
            curve.push((step, value));
            if curve.len() > POINTS {
                let mut number = 0;
                curve.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
            }
        }
    }

    pub fn progress(&self) -> Option<&Progress> {
        self.job.status.as_ref()?.progress.as_ref()
    }

    /// Shows another metric from now on.
    pub fn next_metric(&mut self) {
        let Some(shown) = self.metric().map(str::to_owned) else { return };
        let behind = self.curves.keys().skip_while(|name| **name != shown).nth(1);
        self.chosen = behind.or_else(|| self.curves.keys().next()).cloned();
    }

    /// Returns the name of the metric that is shown: the chosen one, else the loss, else any.
    pub fn metric(&self) -> Option<&str> {
        let has = |name: &&str| self.curves.contains_key(*name);
        let chosen = self.chosen.as_deref().filter(has).or_else(|| Some("loss").filter(has));
        chosen.or_else(|| self.curves.keys().next().map(String::as_str))
    }

    /// Returns steps and values of the metric that is shown.
    pub fn curve(&self) -> &[(f64, f64)] {
        self.metric().and_then(|name| self.curves.get(name)).map_or(&[], Vec::as_slice)
    }

    /// Returns the pods: servers, then trainers; those that are not well come first.
    pub fn pods(&self, now: Timestamp) -> Vec<PodLine> {
        let slow = self.progress().map_or(&[][..], |progress| &progress.stragglers);
        let mut lines: Vec<_> =
            self.pods.iter().map(|((role, index, _), pod)| line(*role, *index, pod, slow, now)).collect();
        lines.sort_by_key(|line| line.is_well);
        lines
    }

    /// Returns the events, the newest first.
    pub fn events(&self, now: Timestamp) -> Vec<EventLine> {
        let mut all: Vec<_> = self.events.values().map(|event| (time(event), event)).collect();
        all.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        let line = |(time, event): (Option<Timestamp>, &KubernetesEvent)| EventLine {
            age: time.map(|time| text::span(now.duration_since(time).as_secs().max(0))).unwrap_or_default(),
            reason: event.reason.clone().unwrap_or_default(),
            message: event.message.clone().unwrap_or_default(),
            is_warning: event.type_.as_deref() == Some("Warning"),
        };
        all.into_iter().map(line).collect()
    }

    /// Returns a line about the job for when the picture is gone.
    pub fn last_words(&self) -> String {
        let name = self.job.metadata.name.as_deref().unwrap_or_default();
        if self.is_deleted {
            return format!("{name} was deleted");
        }
        match text::phase(&self.job) {
            Some(phase) if phase.is_final() => format!("{name}: {phase:?}"),
            _ => format!("{name} goes on"),
        }
    }
}

/// Returns when an event happened last.
pub fn time(event: &KubernetesEvent) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
    let micro = series.or(event.event_time.as_ref()).map(|time| time.0);
    event.last_timestamp.as_ref().map(|time| time.0).max(micro)
}

/// Returns where a pod stands among the others; `None` for one that is no server or trainer.
pub fn place(pod: &Pod) -> Option<(Role, u32, String)> {
    let labels = pod.metadata.labels.as_ref()?;
    Some((Role::parse(labels.get(LABEL_ROLE)?)?, labels.get(LABEL_INDEX)?.parse().ok()?, pod.metadata.name.clone()?))
}

/// Describes a pod; `slow` names those of slow trainers.
pub fn line(role: Role, index: u32, pod: &Pod, slow: &[String], now: Timestamp) -> PodLine {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.clone()).unwrap_or_default();
    let container = status.and_then(|status| status.container_statuses.as_ref()?.first());
    let state = container.and_then(|container| container.state.as_ref());
    let waiting = state.and_then(|state| state.waiting.as_ref()?.reason.clone());
    let ended = state.and_then(|state| state.terminated.as_ref());
    let ended = ended.map(|ended| match &ended.reason {
        Some(reason) if reason != "Completed" && reason != "Error" => {
            format!("{reason}, exit code {}", ended.exit_code)
        }
        _ => format!("ended, exit code {}", ended.exit_code),
    });
    let leaving = pod.metadata.deletion_timestamp.as_ref().map(|_| "Terminating".to_owned());
    let is_ready = container.is_some_and(|container| container.ready);
    let is_well = leaving.is_none() && (phase == "Succeeded" || (phase == "Running" && is_ready));
    let running = || if phase == "Running" && !is_ready { "Running, not ready".to_owned() } else { phase.clone() };
    PodLine {
        process: format!("{role}-{index}"),
        state: leaving.or(ended).or(waiting).unwrap_or_else(running),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        age: text::age(pod.metadata.creation_timestamp.as_ref(), now),
        is_slow: pod.metadata.name.as_ref().is_some_and(|name| slow.contains(name)),
        is_well,
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::{Value, json};

    use super::*;

    pub fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("in range")
    }

    pub fn job(uid: &str, phase: &str, progress: Value) -> ParameterServerJob {
        serde_json::from_value(json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob",
            "metadata": {"name": "mnist", "uid": uid, "creationTimestamp": at(-70).to_string()},
            "spec": {"trainer": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}},
            "status": {"phase": phase, "reason": phase, "restarts": 1, "restartsCountTowardsMax": 0, "progress": progress},
        }))
        .expect("a job")
    }

    pub fn progress(step: i64, loss: f64) -> Value {
        json!({"step": step, "totalSteps": 1500, "percent": step * 100 / 1500, "summary": "", "examplesPerSecond": 641.5,
            "estimatedRemainingSeconds": 100, "metrics": [{"name": "accuracy", "value": 0.9}, {"name": "loss", "value": loss}],
            "stragglers": ["mnist-trainer-1"]})
    }

    pub fn pod(role: &str, index: u32, ready: bool, state: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": format!("mnist-{role}-{index}"), "creationTimestamp": at(-30).to_string(),
                "labels": {LABEL_ROLE: role, LABEL_INDEX: index.to_string()}},
            "spec": {"nodeName": "worker-1", "containers": []},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "main", "ready": ready, "restartCount": 0, "image": "i", "imageID": "", "state": state}]},
        }))
        .expect("a pod")
    }

    pub fn event(uid: &str, second: i64, warning: bool) -> KubernetesEvent {
        serde_json::from_value(json!({
            "metadata": {"uid": uid}, "involvedObject": {}, "type": if warning { "Warning" } else { "Normal" },
            "reason": "PodLost", "message": "trainer 1 was lost", "lastTimestamp": at(second).to_string(),
        }))
        .expect("an event")
    }

    #[test]
    fn a_curve_has_each_step_once_and_begins_anew_with_another_job() {
        let mut board = Board::new(job("a", "Running", progress(0, 2.0)), at(0));
        assert_eq!(board.metric(), Some("loss"));
        for (step, loss) in [(10, 1.0), (20, 0.5), (15, 0.7)] {
            board.see_job(Ok(Event::Apply(job("a", "Running", progress(step, loss)))), at(step));
        }
        assert_eq!(board.curve(), [(0.0, 2.0), (10.0, 1.0), (15.0, 0.7)], "the job went back to step 15");
        board.next_metric();
        assert_eq!(board.metric(), Some("accuracy"), "behind the last comes the first");
        board.next_metric();
        assert_eq!(board.metric(), Some("examples/s"));
        board.see_job(Ok(Event::Apply(job("b", "Running", progress(1, 3.0)))), at(50));
        assert_eq!((board.curve(), board.since), (&[(1.0, 641.5)][..], at(50)));
        for step in 2..3_000 {
            board.see_job(Ok(Event::Apply(job("b", "Running", progress(step, 1.0)))), at(60));
        }
        let curve = board.curve();
        assert!(curve.len() <= POINTS && curve.last() == Some(&(2999.0, 641.5)), "{}", curve.len());
    }

    #[test]
    fn pods_that_are_not_well_come_first() {
        let mut board = Board::new(job("a", "Running", progress(1, 1.0)), at(0));
        let running = || json!({"running": {}});
        for pod in [
            pod("trainer", 1, true, running()),
            pod("trainer", 0, false, json!({"waiting": {"reason": "ImagePullBackOff"}})),
            pod("ps", 0, true, running()),
            pod("trainer", 2, false, json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
        ] {
            board.see_pod(Ok(Event::Apply(pod)));
        }
        let lines = board.pods(at(0));
        let shown: Vec<_> =
            lines.iter().map(|line| (line.process.as_str(), line.state.as_str(), line.is_slow)).collect();
        assert_eq!(
            shown,
            [
                ("trainer-0", "ImagePullBackOff", false),
                ("trainer-2", "OOMKilled, exit code 137", false),
                ("ps-0", "Running", false),
                ("trainer-1", "Running", true),
            ]
        );
        board.see_pod(Ok(Event::Delete(pod("trainer", 0, true, running()))));
        assert_eq!(board.pods(at(0)).len(), 3);
    }

    #[test]
    fn events_are_shown_once_the_newest_first() {
        let mut board = Board::new(job("a", "Running", Value::Null), at(0));
        for event in [event("x", -60, true), event("y", -5, false), event("x", -1, true)] {
            board.see_event(Ok(Event::Apply(event)));
        }
        let ages: Vec<_> = board.events(at(0)).into_iter().map(|event| (event.age, event.is_warning)).collect();
        assert_eq!(ages, [("1s".to_owned(), true), ("5s".to_owned(), false)]);
        assert_eq!((board.metric(), board.last_words()), (None, "mnist goes on".to_owned()));
    }
}
