//! From the objects of a cluster to what the page shows. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use psjobs_api::Role;
use psjobs_api::crd::names::{LABEL_INDEX, LABEL_JOB, LABEL_ROLE};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_web::curves::{Curves, EXAMPLES};
use psjobs_web::job::{Checkpoint, Command, EVENTS, Event, Explanation, Job, Process, Progress, RUNS, Run, Tail};
use serde_json::json;

use super::facts::{EventFacts, PodFacts, milliseconds};
use crate::connection::Flags;
use crate::text;
use crate::why::explain;

/// One job as the cluster has it.
pub struct Seen<'a> {
    pub job: &'a ParameterServerJob,
    pub pods: &'a [&'a PodFacts],
    pub events: &'a [&'a EventFacts],
    /// The last error of a cluster that does not answer, or refuses to.
    pub trouble: Option<&'a str>,
}

/// Generation and labels of a job's manifest.
type Version = (Option<i64>, Option<BTreeMap<String, String>>);

/// The pods of one job that were there while the page was served, also those that are gone.
#[derive(Debug, Default)]
pub struct History {
    uid: Option<String>,
    /// This is the first time that the job is seen.
    is_new: bool,
    /// By uid of the pod.
    runs: BTreeMap<(Role, u32), BTreeMap<String, Run>>,
    /// Version of the manifest that the page has.
    manifest: Option<Version>,
}

impl History {
    /// Records the job and its pods as they are `now`.
    pub fn see(&mut self, job: &ParameterServerJob, pods: &[&PodFacts], now: Timestamp) {
        // Another job of the name has another history.
        self.is_new = self.uid != job.metadata.uid;
        if self.is_new {
            *self = Self { uid: job.metadata.uid.clone(), is_new: true, ..Self::default() };
        }
        self.note(pods, text::phase(job), now);
    }

    fn note(&mut self, pods: &[&PodFacts], phase: Option<Phase>, now: Timestamp) {
        for pod in pods {
            let Some(run) = &pod.run else { continue };
            let runs = self.runs.entry((pod.role, pod.index)).or_default();
            runs.insert(pod.uid.clone(), run.clone());
            if runs.len() > RUNS
                && let Some(oldest) = runs.iter().min_by_key(|(_, run)| run.from).map(|(uid, _)| uid.clone())
            {
                runs.remove(&oldest);
            }
        }
        // A pod that is gone ran until now, and its end was not seen. Of a job that ends or is suspended it was removed.
        let failed =
            !phase.is_some_and(|phase| phase.is_final() || matches!(phase, Phase::Completing | Phase::Suspended));
        let there: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        for (uid, run) in self.runs.values_mut().flatten() {
            if run.to.is_none() && !there.contains(uid.as_str()) {
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

    /// Returns whether the manifest of a job is other than the one that was asked about before.
    fn needs_manifest(&mut self, job: &ParameterServerJob) -> bool {
        let made_of = Some((job.metadata.generation, job.metadata.labels.clone()));
        let is_other = self.manifest != made_of;
        self.manifest = made_of;
        is_other
    }
}

/// Returns the processes of a job, those without a pod among them.
fn processes(pods: &[&PodFacts], history: &History, slow: &[String], is_over: bool) -> Vec<Process> {
    let gone = |&(role, index): &(Role, u32)| {
        let runs = history.runs((role, index));
        let is_well = is_over && runs.last().is_some_and(|run| !run.failed);
        ((role, index), Process { name: format!("{role}-{index}"), state: "no pod".into(), is_well, node: None, runs })
    };
    let mut all: BTreeMap<(Role, u32), Process> = history.runs.keys().map(gone).collect();
    // A successor and its predecessor may both be there; the last one counts.
    let mut pods = pods.to_vec();
    pods.sort_by_key(|pod| pod.created);
    for pod in pods {
        let is_slow = slow.contains(&pod.name);
        let state = if is_slow { format!("{}, slower than the others", pod.state) } else { pod.state.clone() };
        let (place, runs) = ((pod.role, pod.index), history.runs((pod.role, pod.index)));
        let is_well = pod.is_well && !is_slow;
        all.insert(place, Process { name: pod.process(), state, is_well, node: pod.node.clone(), runs });
    }
    all.into_values().collect()
}

/// Writes a job as it is `now` to what the page shows.
pub fn show(seen: &Seen, history: &mut History, flags: &Flags, now: Timestamp, shown: &mut Job, curves: &mut Curves) {
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
    // It is long, and seldom another.
    let manifest = match history.needs_manifest(job) || shown.manifest.is_empty() {
        true => manifest(job),
        false => std::mem::take(&mut shown.manifest),
    };
    *shown = Job {
        name: job.name_any(),
        phase: phase.map_or_else(|| "Pending".into(), |phase| format!("{phase:?}")),
        is_over,
        began,
        ended: time(status.and_then(|status| status.completion_time.as_ref())),
        explanation,
        progress: progress(job),
        // Server 0 says these, whoever asks it.
        trainers: if is_over || history.is_new { Vec::new() } else { std::mem::take(&mut shown.trainers) },
        processes: processes(pods, history, slow, is_over),
        events: page_events(job, events),
        checkpoint: status.and_then(|status| status.last_checkpoint.as_ref()).map(|checkpoint| Checkpoint {
            step: checkpoint.step.unsigned_abs(),
            path: checkpoint.path.clone(),
            time: time(checkpoint.time.as_ref()).unwrap_or_default(),
        }),
        staleness: if history.is_new { Vec::new() } else { std::mem::take(&mut shown.staleness) },
        manifest,
    };
    let Some(progress) = status.and_then(|status| status.progress.as_ref()).filter(|progress| progress.step > 0) else {
        return;
    };
    let step = progress.step.unsigned_abs();
    let rate = progress.examples_per_second.map(|rate| (EXAMPLES, rate));
    let metrics = progress.metrics.iter().map(|metric| (metric.name.as_str(), metric.value));
    metrics.chain(rate).for_each(|(name, value)| curves.push(name, None, step, milliseconds(now), value));
}

/// Returns role and index of a process, as `trainer-1`, and the selector of the pods that may have it: that of a server may be in the
/// pod of a trainer.
pub fn selector(job: &str, process: &str) -> Option<(Role, u32, String)> {
    let (role, index) = process.rsplit_once('-')?;
    let (role, index) = (Role::parse(role)?, index.parse::<u32>().ok()?);
    let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
    let roles = match role {
        Role::Server => format!("{LABEL_ROLE} in ({role},{})", Role::Trainer),
        Role::Trainer => format!("{LABEL_ROLE}={role}"),
    };
    is_name(job).then(|| (role, index, format!("{LABEL_JOB}={job},{roles},{LABEL_INDEX}={index}")))
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
fn page_events(job: &ParameterServerJob, events: &[&EventFacts]) -> Vec<Event> {
    let of_job = |event: &&&EventFacts| event.job.is_none() || event.job == job.metadata.uid;
    let mut all: Vec<_> = events.iter().filter(of_job).map(|event| event.event.clone()).collect();
    all.sort_by_key(|event| event.time);
    let surplus = all.len().saturating_sub(EVENTS);
    all.split_off(surplus)
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::top::board::tests::{at, event, job, pod, progress};

    fn shown(seen: &Seen, history: &mut History, now: Timestamp) -> Job {
        let (mut page, mut curves) = (Job::default(), Curves::default());
        history.see(seen.job, seen.pods, now);
        show(seen, history, &Flags::default(), now, &mut page, &mut curves);
        page
    }

    /// A pod that runs since `second`.
    fn running(role: &str, index: u32, uid: &str, second: i64) -> PodFacts {
        let mut pod = pod(role, index, true, json!({"running": {"startedAt": at(second).to_string()}}));
        pod.metadata.uid = Some(uid.into());
        PodFacts::of(&pod).expect("a pod of a job")
    }

    #[test]
    fn a_job_of_the_cluster_is_shown_with_what_why_says_of_it() {
        let job = job("a", "Running", progress(300, 0.5));
        let (server, trainer) = (running("ps", 0, "s", -30), running("trainer", 1, "t", -20));
        let (late, early) = (EventFacts::from(&event("x", -5, true)), EventFacts::from(&event("y", -60, false)));
        let seen = Seen { job: &job, pods: &[&trainer, &server], events: &[&late, &early], trouble: None };
        let page = shown(&seen, &mut History::default(), at(0));
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
    fn a_manifest_is_written_again_when_it_is_another() {
        let mut job = job("a", "Running", Value::Null);
        let (mut history, mut page, mut curves) = (History::default(), Job::default(), Curves::default());
        let mut shown = |job: &ParameterServerJob| {
            let seen = Seen { job, pods: &[], events: &[], trouble: None };
            history.see(job, &[], at(0));
            show(&seen, &mut history, &Flags::default(), at(0), &mut page, &mut curves);
            page.manifest.clone()
        };
        let first = shown(&job);
        assert_eq!(shown(&job), first);
        job.spec.suspend = true;
        job.metadata.generation = Some(2);
        assert!(shown(&job).contains("suspend: true"));
        job.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "vision".to_owned())]));
        assert!(shown(&job).contains("team: vision"));
    }

    #[test]
    fn a_pod_that_was_replaced_stays_in_the_history_of_its_process() {
        let (job, other) = (job("a", "Running", Value::Null), job("b", "Pending", Value::Null));
        let mut history = History::default();
        let (first, second) = (running("trainer", 0, "z", 0), running("trainer", 0, "a", 9));
        shown(&Seen { job: &job, pods: &[&first], events: &[], trouble: None }, &mut history, at(5));
        let page = shown(&Seen { job: &job, pods: &[&second], events: &[], trouble: None }, &mut history, at(10));
        let wanted = [
            Run { from: milliseconds(at(0)), to: Some(milliseconds(at(10))), failed: true },
            Run { from: milliseconds(at(9)), to: None, failed: false },
        ];
        assert_eq!(page.processes[0].runs, wanted);
        let page = shown(&Seen { job: &job, pods: &[], events: &[], trouble: Some("forbidden") }, &mut history, at(10));
        assert_eq!((page.processes[0].state.as_str(), page.processes[0].is_well), ("no pod", false));
        assert_eq!(page.explanation.sentences[0], "The cluster does not answer as it should: forbidden.");
        let page = shown(&Seen { job: &other, pods: &[&second], events: &[], trouble: None }, &mut history, at(11));
        assert_eq!(page.processes[0].runs, wanted[1..], "another job of the name");
    }

    #[test]
    fn only_a_process_selects_pods() {
        assert_eq!(
            selector("mnist", "trainer-12"),
            Some((
                Role::Trainer,
                12,
                "psjobs.dev/job-name=mnist,psjobs.dev/role=trainer,psjobs.dev/index=12".to_owned()
            ))
        );
        let (.., selected) = selector("mnist", "ps-1").expect("a server");
        assert_eq!(selected, "psjobs.dev/job-name=mnist,psjobs.dev/role in (ps,trainer),psjobs.dev/index=1");
        for (job, process) in
            [("mnist", "trainer"), ("mnist", "cook-1"), ("mnist", "ps-x"), ("a,b", "ps-0"), ("a=b", "ps-0")]
        {
            assert_eq!(selector(job, process), None, "{job} {process}");
        }
    }
}
