//! From the objects of a cluster to what the page shows. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use psjobs_api::Role;
use psjobs_api::crd::names::{LABEL_INDEX, LABEL_JOB, LABEL_ROLE};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_web::curves::Curves;
use psjobs_web::job::{Checkpoint, Command, EVENTS, Event, Explanation, Job, Process, Progress, RUNS, Run, Tail};
use serde_json::json;

use crate::connection::Flags;
use crate::text;
use crate::top::board::{self, PodLine};
use crate::why::explain;

/// One job as the cluster has it.
pub struct Seen<'a> {
    pub job: &'a ParameterServerJob,
    pub pods: &'a [&'a Pod],
    pub events: &'a [&'a KubernetesEvent],
    /// The last error of a cluster that does not answer, or refuses to.
    pub trouble: Option<&'a str>,
}

/// Pods that were there while the page was served, of all jobs.
#[derive(Debug, Default)]
pub struct Histories(BTreeMap<String, History>);

/// The pods of one job, also those that are gone.
#[derive(Debug, Default)]
pub struct History {
    uid: Option<String>,
    /// This is the first time that the job is seen.
    is_new: bool,
    /// By uid of the pod.
    runs: BTreeMap<(Role, u32), BTreeMap<String, Run>>,
}

impl Histories {
    /// Returns the history of a job, with its pods as they are `now`.
    pub fn of(&mut self, job: &ParameterServerJob, pods: &[&Pod], now: Timestamp) -> &History {
        let history = self.0.entry(job.name_any()).or_default();
        // Another job of the name has another history.
        history.is_new = history.uid != job.metadata.uid;
        if history.is_new {
            *history = History { uid: job.metadata.uid.clone(), is_new: true, runs: BTreeMap::new() };
        }
        history.note(pods, text::phase(job), now);
        history
    }

    /// Removes the jobs that `is_there` does not name, and returns their names.
    pub fn retain(&mut self, is_there: impl Fn(&str) -> bool) -> Vec<String> {
        self.0.extract_if(.., |name, _| !is_there(name)).map(|(name, _)| name).collect()
    }
}

impl History {
    fn note(&mut self, pods: &[&Pod], phase: Option<Phase>, now: Timestamp) {
        for pod in pods {
            let (Some((role, index, _)), Some(uid), Some(run)) = (board::place(pod), pod.uid(), run(pod)) else {
                continue;
            };
            let runs = self.runs.entry((role, index)).or_default();
            runs.insert(uid, run);
            if runs.len() > RUNS
                && let Some(oldest) = runs.iter().min_by_key(|(_, run)| run.from).map(|(uid, _)| uid.clone())
            {
                runs.remove(&oldest);
            }
        }
        // A pod that is gone ran until now, and its end was not seen. Of a job that ends or is suspended it was removed.
        let failed =
            !phase.is_some_and(|phase| phase.is_final() || matches!(phase, Phase::Completing | Phase::Suspended));
        let there: BTreeSet<String> = pods.iter().filter_map(|pod| pod.uid()).collect();
        for (uid, run) in self.runs.values_mut().flatten() {
            if run.to.is_none() && !there.contains(uid) {
                *run = Run { to: Some(milliseconds(now)), failed, ..*run };
            }
        }
    }

    /// Returns the runs of a process, the oldest first.
    fn runs(&self, place: (Role, u32)) -> Vec<Run> {
        let mut runs: Vec<Run> = self.runs.get(&place).into_iter().flat_map(BTreeMap::values).cloned().collect();
        runs.sort_by_key(|run| run.from);
        runs
    }
}

/// Returns the processes of a job, those without a pod among them.
fn processes(pods: &[&Pod], history: &History, slow: &[String], is_over: bool, now: Timestamp) -> Vec<Process> {
    let gone = |&(role, index): &(Role, u32)| {
        let runs = history.runs((role, index));
        let is_well = is_over && runs.last().is_some_and(|run| !run.failed);
        ((role, index), Process { name: format!("{role}-{index}"), state: "no pod".into(), is_well, node: None, runs })
    };
    let mut all: BTreeMap<(Role, u32), Process> = history.runs.keys().map(gone).collect();
    for pod in pods {
        let Some((role, index, _)) = board::place(pod) else { continue };
        let PodLine { process, mut state, node, is_slow, is_well, .. } = board::line(role, index, pod, slow, now);
        if is_slow {
            state += ", slower than the others";
        }
        let node = Some(node).filter(|node| !node.is_empty());
        let runs = history.runs((role, index));
        all.insert((role, index), Process { name: process, state, is_well: is_well && !is_slow, node, runs });
    }
    all.into_values().collect()
}

/// Writes a job as it is `now` to what the page shows.
pub fn show(seen: &Seen, history: &History, flags: &Flags, now: Timestamp, shown: &mut Job, curves: &mut Curves) {
    let Seen { job, pods, events, trouble } = seen;
    let status = job.status.as_ref();
    let phase = text::phase(job);
    let time = |time: Option<&Time>| time.map(|time| milliseconds(time.0));
    let began = time(status.and_then(|status| status.start_time.as_ref()));
    let began = began.or_else(|| time(job.metadata.creation_timestamp.as_ref())).unwrap_or_default();
    let slow = status.and_then(|status| Some(&*status.progress.as_ref()?.stragglers)).unwrap_or_default();
    let is_over = phase.is_some_and(Phase::is_final);
    let mut explanation = explanation(job, flags, now);
    if let Some(trouble) = trouble {
        explanation.sentences.insert(0, format!("The cluster does not answer as it should: {trouble}."));
        explanation.needs_help = true;
    }
    if history.is_new {
        *curves = Curves::default();
    }
    *shown = Job {
        name: job.name_any(),
        phase: phase.map_or_else(|| "Pending".into(), |phase| format!("{phase:?}")),
        is_over,
        began,
        ended: time(status.and_then(|status| status.completion_time.as_ref())),
        explanation,
        progress: progress(job),
        trainers: Vec::new(),
        processes: processes(pods, history, slow, is_over, now),
        events: page_events(job, events),
        checkpoint: status.and_then(|status| status.last_checkpoint.as_ref()).map(|checkpoint| Checkpoint {
            step: checkpoint.step.unsigned_abs(),
            path: checkpoint.path.clone(),
            time: time(checkpoint.time.as_ref()).unwrap_or_default(),
        }),
        staleness: Vec::new(),
        manifest: manifest(job),
    };
    let Some(progress) = status.and_then(|status| status.progress.as_ref()).filter(|progress| progress.step > 0) else {
        return;
    };
    let step = progress.step.unsigned_abs();
    let rate = progress.examples_per_second.map(|rate| ("examples/s", rate));
    let metrics = progress.metrics.iter().map(|metric| (metric.name.as_str(), metric.value));
    metrics.chain(rate).for_each(|(name, value)| curves.push(name, None, step, milliseconds(now), value));
}

/// Returns the selector of the pods of a process, as `trainer-1`.
pub fn selector(job: &str, process: &str) -> Option<String> {
    let (role, index) = process.rsplit_once('-')?;
    let (role, index) = (Role::parse(role)?, index.parse::<u32>().ok()?);
    let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
    is_name(job).then(|| format!("{LABEL_JOB}={job},{LABEL_ROLE}={role},{LABEL_INDEX}={index}"))
}

/// Returns what `kubectl psjob why` says of a job.
pub fn explanation(job: &ParameterServerJob, flags: &Flags, now: Timestamp) -> Explanation {
    let said = explain(job, now);
    let command = |(command, purpose): &(String, &str)| Command {
        command: flags.behind(command),
        purpose: (*purpose).to_owned(),
    };
    Explanation {
        commands: said.next.iter().map(command).collect(),
        sentences: said.sentences,
        log: said.log.map(|(process, text)| Tail { process, text }),
        needs_help: said.needs_help,
    }
}

fn progress(job: &ParameterServerJob) -> Progress {
    let Some(status) = &job.status else { return Progress::default() };
    let restarts = status.restarts.unsigned_abs();
    let Some(progress) = &status.progress else { return Progress { restarts, ..Progress::default() } };
    Progress {
        step: progress.step.unsigned_abs(),
        total_steps: progress.total_steps.unsigned_abs(),
        examples_per_second: progress.examples_per_second.unwrap_or_default(),
        remaining_seconds: progress.estimated_remaining_seconds.map(i64::unsigned_abs),
        restarts,
    }
}

/// Returns the last events of this job, not of one that had its name before, the oldest first.
fn page_events(job: &ParameterServerJob, events: &[&KubernetesEvent]) -> Vec<Event> {
    let of_job = |event: &&&KubernetesEvent| {
        event.involved_object.uid.is_none() || event.involved_object.uid == job.metadata.uid
    };
    let mut all: Vec<_> = events
        .iter()
        .filter(of_job)
        .map(|event| Event {
            time: board::time(event).map(milliseconds).unwrap_or_default(),
            is_warning: event.type_.as_deref() == Some("Warning"),
            text: event_text(event),
        })
        .collect();
    all.sort_by_key(|event| event.time);
    let surplus = all.len().saturating_sub(EVENTS);
    all.split_off(surplus)
}

/// Returns the reason and the message; a message that begins with the reason is enough.
fn event_text(event: &KubernetesEvent) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (reason, message) = (text(&event.reason), text(&event.message));
    if message.starts_with(&reason) { message } else { format!("{reason}: {message}") }
}

/// The job without what the cluster adds.
fn manifest(job: &ParameterServerJob) -> String {
    let meta = &job.metadata;
    let mut document = json!({
        "apiVersion": "psjobs.dev/v1alpha1", "kind": psjobs_api::crd::KIND,
        "metadata": {"name": meta.name, "namespace": meta.namespace}, "spec": job.spec,
    });
    if let Some(labels) = &meta.labels {
        document["metadata"]["labels"] = json!(labels);
    }
    serde_yaml::to_string(&document).unwrap_or_default()
}

/// The time in which the first container of a pod ran; `None` if it has not started.
fn run(pod: &Pod) -> Option<Run> {
    let container = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let state = container.state.as_ref()?;
    if let Some(running) = &state.running {
        let from = running.started_at.as_ref().or(pod.metadata.creation_timestamp.as_ref())?;
        return Some(Run { from: milliseconds(from.0), to: None, failed: false });
    }
    let ended = state.terminated.as_ref()?;
    let from = ended.started_at.as_ref().or(pod.metadata.creation_timestamp.as_ref())?;
    let to = ended.finished_at.as_ref().map(|time| milliseconds(time.0));
    Some(Run { from: milliseconds(from.0), to: to.or(Some(milliseconds(from.0))), failed: ended.exit_code != 0 })
}

fn milliseconds(time: Timestamp) -> u64 {
    time.as_millisecond().unsigned_abs()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::top::board::tests::{at, event, job, pod, progress};

    fn shown(seen: &Seen, histories: &mut Histories, now: Timestamp) -> Job {
        let (mut page, mut curves) = (Job::default(), Curves::default());
        let history = histories.of(seen.job, seen.pods, now);
        show(seen, history, &Flags::default(), now, &mut page, &mut curves);
        page
    }

    fn named(mut pod: Pod, uid: &str) -> Pod {
        pod.metadata.uid = Some(uid.into());
        pod
    }

    #[test]
    fn a_job_of_the_cluster_is_shown_with_what_why_says_of_it() {
        let job = job("a", "Running", progress(300, 0.5));
        let server = named(pod("ps", 0, true, json!({"running": {"startedAt": at(-30).to_string()}})), "s");
        let trainer = named(pod("trainer", 1, true, json!({"running": {"startedAt": at(-20).to_string()}})), "t");
        let (late, early) = (event("x", -5, true), event("y", -60, false));
        let seen = Seen { job: &job, pods: &[&trainer, &server], events: &[&late, &early], trouble: None };
        let page = shown(&seen, &mut Histories::default(), at(0));
        assert_eq!((page.name.as_str(), page.phase.as_str(), page.is_over), ("mnist", "Running", false));
        assert_eq!(page.began, milliseconds(at(-70)));
        let Progress { step, total_steps, remaining_seconds, restarts, .. } = page.progress;
        assert_eq!((step, total_steps, remaining_seconds, restarts), (300, 1500, Some(100), 1));
        let said = explain(&job, at(0));
        assert!(!said.sentences.is_empty() && page.explanation.sentences == said.sentences);
        assert_eq!(page.explanation.commands[0].command, "kubectl psjob watch mnist");
        let processes: Vec<_> = page.processes.iter().map(|p| (p.name.as_str(), p.state.as_str(), p.is_well)).collect();
        assert_eq!(processes, [("ps-0", "Running", true), ("trainer-1", "Running, slower than the others", false)]);
        assert_eq!(page.processes[0].runs, [Run { from: milliseconds(at(-30)), to: None, failed: false }]);
        let events: Vec<_> = page.events.iter().map(|event| (event.time, event.is_warning)).collect();
        assert_eq!(events, [(milliseconds(at(-60)), false), (milliseconds(at(-5)), true)]);
        assert_eq!(page.events[0].text, "PodLost: trainer 1 was lost");
        assert!(
            page.manifest.contains("kind: ParameterServerJob") && !page.manifest.contains("status:"),
            "{}",
            page.manifest
        );
    }

    #[test]
    fn a_pod_that_was_replaced_stays_in_the_history_of_its_process() {
        let (job, other) = (job("a", "Running", Value::Null), job("b", "Pending", Value::Null));
        let mut histories = Histories::default();
        let first = named(pod("trainer", 0, true, json!({"running": {"startedAt": at(0).to_string()}})), "z");
        let second = named(pod("trainer", 0, true, json!({"running": {"startedAt": at(9).to_string()}})), "a");
        shown(&Seen { job: &job, pods: &[&first], events: &[], trouble: None }, &mut histories, at(5));
        let page = shown(&Seen { job: &job, pods: &[&second], events: &[], trouble: None }, &mut histories, at(10));
        let wanted = [
            Run { from: milliseconds(at(0)), to: Some(milliseconds(at(10))), failed: true },
            Run { from: milliseconds(at(9)), to: None, failed: false },
        ];
        assert_eq!(page.processes[0].runs, wanted);
        let page =
            shown(&Seen { job: &job, pods: &[], events: &[], trouble: Some("forbidden") }, &mut histories, at(10));
        assert_eq!((page.processes[0].state.as_str(), page.processes[0].is_well), ("no pod", false));
        assert_eq!(page.explanation.sentences[0], "The cluster does not answer as it should: forbidden.");
        let page = shown(&Seen { job: &other, pods: &[&second], events: &[], trouble: None }, &mut histories, at(11));
        assert_eq!(page.processes[0].runs, wanted[1..], "another job of the name");
        assert_eq!(histories.retain(|name| name != "mnist"), ["mnist"]);
    }

    #[test]
    fn only_a_process_selects_pods() {
        assert_eq!(
            selector("mnist", "trainer-12").as_deref(),
            Some("psjobs.dev/job-name=mnist,psjobs.dev/role=trainer,psjobs.dev/index=12")
        );
        for (job, process) in
            [("mnist", "trainer"), ("mnist", "cook-1"), ("mnist", "ps-x"), ("a,b", "ps-0"), ("a=b", "ps-0")]
        {
            assert_eq!(selector(job, process), None, "{job} {process}");
        }
    }
}
