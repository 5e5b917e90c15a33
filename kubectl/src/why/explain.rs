//! Explains the status of a job in sentences and commands.

use jiff::Timestamp;
use psjobs_api::crd::names::{LABEL_JOB, LABEL_SHARD};
use psjobs_api::crd::{
    ConditionType, JobCondition, MANAGER, ParameterServerJob, ParameterServerJobStatus, Phase, names,
};
use serde_json::{Value, json};

use crate::connection::Flags;
use crate::text;

/// Sentences about a job, and commands to type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// Name of the job.
    pub job: String,
    /// Phase and reason in the status.
    pub state: String,
    /// The state of affairs, the most important first.
    pub sentences: Vec<String>,
    /// The pod that failed first, and its last lines.
    pub log: Option<(String, String)>,
    /// Commands to type, with what each is for.
    pub next: Vec<(String, &'static str)>,
    /// The job failed, or waits for something that a person has to do.
    pub needs_help: bool,
}

impl Explanation {
    /// The explanation for people; `flags` are added to every command.
    pub fn as_text(&self, flags: &Flags) -> String {
        let mut lines = vec![format!("{} is {}.", self.job, self.state)];
        lines.extend(self.sentences.iter().cloned());
        if let Some((pod, tail)) = &self.log {
            lines.push(format!("The last lines of {pod}:"));
            lines.extend(tail.lines().map(|line| format!("  {line}")));
        }
        let commands: Vec<_> = self.next.iter().map(|(command, _)| flags.behind(command)).collect();
        let width = commands.iter().map(|command| command.chars().count()).max().unwrap_or_default();
        for (number, (command, (_, purpose))) in commands.iter().zip(&self.next).enumerate() {
            if number == 0 {
                lines.push("Next:".to_owned());
            }
            lines.push(format!("  {command:width$}  # {purpose}"));
        }
        lines.join("\n")
    }

    /// The explanation for programs.
    pub fn as_json(&self, flags: &Flags) -> Value {
        let next = |(command, purpose): &(String, &str)| json!({"command": flags.behind(command), "purpose": purpose});
        json!({
            "job": self.job,
            "state": self.state,
            "explanation": self.sentences.join(" "),
            "needsHelp": self.needs_help,
            "log": self.log.as_ref().map(|(pod, tail)| json!({"pod": pod, "tail": tail})),
            "next": self.next.iter().map(next).collect::<Vec<_>>(),
        })
    }
}

/// Says what the job waits for, why it failed, or how far it is at the time `now`.
pub fn explain(job: &ParameterServerJob, now: Timestamp) -> Explanation {
    let name = job.metadata.name.clone().unwrap_or_default();
    let Some((status, phase)) = job.status.as_ref().and_then(|status| Some((status, status.phase?))) else {
        return unseen(job, name, now);
    };
    let reason = text::reason(status);
    let state = format!("{phase:?}{}", reason.map(|reason| format!(" ({reason})")).unwrap_or_default());
    let mut said = Explanation { job: name.clone(), state, ..Explanation::default() };
    match phase {
        Phase::Failed => failed(status, &mut said),
        Phase::Succeeded => succeeded(job, status, &mut said),
        Phase::Suspended => {
            said.sentences.extend(message(status, ConditionType::Suspended));
            said.sentences.push(
                "It has no pods until it is resumed; then it goes on from its last checkpoint, if it has any.".into(),
            );
            said.next.push((format!("kubectl psjob resume {name}"), "start its pods again"));
        }
        Phase::Stalled => {
            said.needs_help = true;
            said.sentences.extend(message(status, ConditionType::Stalled));
            said.next.push((format!("kubectl psjob logs {name} --follow --tail 20"), "what its processes say now"));
            said.next.push((pods(&name), "whether all of them run"));
        }
        Phase::Pending | Phase::Restarting => waits(status, phase, &mut said),
        Phase::Running | Phase::Completing => runs(status, phase, now, &mut said),
    }
    said
}

/// Seconds in which an operator has written the status of a new job, unless something is wrong.
const NEW: i64 = 10;

/// No operator has written a status.
fn unseen(job: &ParameterServerJob, name: String, now: Timestamp) -> Explanation {
    let created = job.metadata.creation_timestamp.as_ref();
    let age = text::age(created, now);
    let said = Explanation { job: name.clone(), ..Explanation::default() };
    if let Some(manager) = job.spec.managed_by.as_ref().filter(|&manager| manager != MANAGER) {
        let sentences = vec![format!("Its spec.managedBy leaves it to {manager}, which has to start it.")];
        return Explanation { state: "left to another manager".into(), sentences, ..said };
    }
    if created.is_some_and(|created| now.duration_since(created.0).as_secs() < NEW) {
        let next = vec![(format!("kubectl psjob watch {name}"), "its progress until it ends")];
        let sentences = vec![format!("It was created {age} ago; an operator looks at it any moment.")];
        return Explanation { state: "new".into(), sentences, next, ..said };
    }
    let shard = job.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_SHARD));
    let only =
        shard.map(|shard| format!(" Its label {LABEL_SHARD} is {shard:?}, so only an operator of that name does."));
    let sentence = format!(
        "It was created {age} ago, and no operator has written a status: look whether one runs and logs errors.{}",
        only.unwrap_or_default()
    );
    let next = vec![
        ("kubectl get pods --all-namespaces --selector app.kubernetes.io/name=psjobs".into(), "the operators"),
        (format!("kubectl describe psjob {name}"), "events of the job"),
    ];
    Explanation { state: "not looked after".into(), sentences: vec![sentence], next, needs_help: true, ..said }
}

fn failed(status: &ParameterServerJobStatus, said: &mut Explanation) {
    let name = said.job.clone();
    said.needs_help = true;
    said.sentences.extend(message(status, ConditionType::Failed));
    if let Some(first) = &status.last_failure {
        let known = first.message.to_lowercase();
        if !said.sentences.iter().any(|sentence| sentence.to_lowercase().contains(&known)) {
            said.sentences.push(text::sentence(&format!("the trouble began with {}: {}", first.pod, first.message)));
        }
        if !first.log_tail.is_empty() {
            said.log = Some((first.pod.clone(), first.log_tail.trim_end().to_owned()));
        }
        said.next
            .push((format!("kubectl psjob logs {name} --rank {}", first.rank), "its whole log, if its pod is kept"));
    }
    said.next.push((
        format!("kubectl psjob clone {name} {name}-again"),
        "the same job once more; --set FIELD=VALUE changes it",
    ));
}

fn succeeded(job: &ParameterServerJob, status: &ParameterServerJobStatus, said: &mut Explanation) {
    said.sentences.extend(message(status, ConditionType::Succeeded));
    if let (Some(began), Some(ended)) = (&status.start_time, &status.completion_time) {
        said.sentences.push(format!("It took {}.", text::span(ended.0.duration_since(began.0).as_secs())));
    }
    if let Some(model) = &status.model {
        let metric = model.metric.as_ref();
        let metric =
            metric.map(|metric| format!(" ({} {})", metric.name, text::number(metric.value))).unwrap_or_default();
        let claim = job
            .spec
            .checkpoint
            .as_ref()
            .map_or_else(|| names::claim(&said.job), |checkpoint| checkpoint.claim(&said.job));
        said.sentences.push(format!("Its model is {} on the volume claim {claim}{metric}.", model.path));
    }
}

/// The job has not all the pods that it needs.
fn waits(status: &ParameterServerJobStatus, phase: Phase, said: &mut Explanation) {
    let name = said.job.clone();
    if phase == Phase::Restarting {
        said.sentences.extend(message(status, ConditionType::Restarting));
        if let Some(first) = &status.last_failure {
            said.sentences.push(text::sentence(&format!("the trouble began with {}: {}", first.pod, first.message)));
        }
    }
    // The condition that the status takes its reason from, else the first that does not hold.
    let kinds = [ConditionType::Created, ConditionType::ServersReady, ConditionType::Running];
    let missing = || {
        kinds
            .iter()
            .filter_map(|&kind| find(status, kind))
            .filter(|found| found.status == "False" && !found.message.is_empty())
    };
    let blocking = missing().find(|found| Some(&found.reason) == status.reason.as_ref()).or_else(|| missing().next());
    let reason = blocking.map_or("", |found| found.reason.as_str());
    said.sentences.extend(blocking.map(|found| text::sentence(&found.message)));
    let correct: [(String, &str); 3] = [
        (format!("kubectl psjob suspend {name}"), "the template of a job that waits cannot change"),
        (format!("kubectl edit psjob {name}"), "correct it"),
        (format!("kubectl psjob resume {name}"), "start it again"),
    ];
    match reason {
        "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" => {
            said.needs_help = true;
            said.sentences.push(
                "Look for a misspelt name or tag, an image that the nodes do not have, or a missing imagePullSecrets."
                    .into(),
            );
            said.next.extend(correct);
        }
        "Unschedulable" => {
            said.needs_help = true;
            said.sentences.push(
                "It starts by itself when a node has room; else ask for less, or add a node or a toleration.".into(),
            );
            said.next.push(("kubectl describe nodes".into(), "what each node has, and who uses it"));
            said.next.extend(correct);
        }
        "Refused" => {
            said.needs_help = true;
            said.next.push(("kubectl describe resourcequota".into(), "what is used, if a quota refuses"));
        }
        _ => {
            said.next.push((pods(&name), "its pods"));
            said.next.push((format!("kubectl describe psjob {name}"), "its events"));
        }
    }
}

/// The job trains or ends.
fn runs(status: &ParameterServerJobStatus, phase: Phase, now: Timestamp, said: &mut Explanation) {
    let name = said.job.clone();
    if phase == Phase::Completing {
        said.sentences.extend(message(status, ConditionType::Completing));
    }
    match &status.progress {
        Some(progress) if progress.step > 0 => {
            let mut parts = vec![format!("It has made {}", text::steps(progress))];
            parts.extend(progress.examples_per_second.map(|rate| format!("{} examples/s", text::number(rate))));
            parts.extend(progress.estimated_remaining_seconds.map(|rest| format!("about {} left", text::span(rest))));
            said.sentences.push(format!("{}.", parts.join(", ")));
            if !progress.stragglers.is_empty() {
                said.sentences
                    .push(format!("Clearly slower than the other trainers: {}.", progress.stragglers.join(", ")));
            }
        }
        _ => {
            let since =
                find(status, ConditionType::Running).map(|running| text::age(Some(&running.last_transition_time), now));
            let since = since.map(|since| format!(" since {since}")).unwrap_or_default();
            said.sentences.push(format!("All of its pods run{since}, and no step is reported yet."));
        }
    }
    said.sentences.extend(message(status, ConditionType::Shrunk));
    if let Some(running) =
        find(status, ConditionType::Running).filter(|running| running.message.contains("cannot start"))
    {
        said.sentences.push(text::sentence(&running.message));
    }
    if status.restarts > 0 {
        let first = status.last_failure.as_ref();
        let first = first.map(|first| format!("; the first trouble was {}: {}", first.pod, first.message));
        let replaced = format!("{} of its pods were replaced{}", status.restarts, first.unwrap_or_default());
        said.sentences.push(text::sentence(&replaced));
    }
    said.next.push((format!("kubectl psjob watch {name}"), "its progress until it ends"));
    said.next.push((format!("kubectl psjob logs {name} --follow --tail 20"), "what its processes say"));
}

fn pods(name: &str) -> String {
    format!("kubectl get pods --output wide --selector {LABEL_JOB}={name}")
}

fn find(status: &ParameterServerJobStatus, type_: ConditionType) -> Option<&JobCondition> {
    status.conditions.iter().find(|condition| condition.type_ == type_)
}

/// The message of a condition that holds.
fn message(status: &ParameterServerJobStatus, type_: ConditionType) -> Option<String> {
    let condition = find(status, type_).filter(|condition| condition.status == "True" && !condition.message.is_empty());
    condition.map(|condition| text::sentence(&condition.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(status: Value) -> ParameterServerJob {
        let spec = json!({"trainer": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}});
        let metadata = json!({"name": "mnist", "namespace": "a", "creationTimestamp": "2026-01-01T00:00:00Z"});
        let mut job = json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "spec": spec, "metadata": metadata,
        });
        if !status.is_null() {
            job["status"] = status;
            for counted in ["restarts", "restartsCountTowardsMax"] {
                if job["status"][counted].is_null() {
                    job["status"][counted] = 0.into();
                }
            }
        }
        serde_json::from_value(job).expect("a job")
    }

    fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
        json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    /// The sections of docs/troubleshooting.md: a status, words of the explanation, the beginning of the first command, and
    /// whether somebody has to do something.
    #[test]
    fn causes_are_named_with_what_to_do() {
        let waiting = |reason: &str, message: &str| {
            json!({"phase": "Pending", "reason": reason, "conditions": [
                condition("Created", "True", "Created", "all pods are created"),
                condition("ServersReady", "True", "Ready", "all servers are ready"),
                condition("Running", "False", reason, message),
            ]})
        };
        let first = json!({"pod": "mnist-trainer-1", "role": "trainer", "rank": 2, "exitCode": 137, "reason": "OOMKilled",
            "message": "trainer 1 needed more memory than the limit of 96Mi", "logTail": "started\nloading\n"});
        let cases: Vec<(Value, &[&str], &str, bool)> = vec![
            (
                Value::Null,
                &["created 5m ago", "no operator has written a status"],
                "kubectl get pods --all-namespaces",
                true,
            ),
            (
                waiting("ErrImagePull", "trainer 0 cannot start: no such image"),
                &["mnist is Pending (ErrImagePull)", "cannot start: no such image", "misspelt name"],
                "kubectl psjob suspend mnist",
                true,
            ),
            (
                waiting("Unschedulable", "trainer 0 cannot start: 2 Insufficient cpu"),
                &["2 Insufficient cpu", "when a node has room"],
                "kubectl describe nodes",
                true,
            ),
            (
                waiting("WaitingForPods", "trainer 0 is pulling its image"),
                &["Trainer 0 is pulling its image."],
                "kubectl get pods",
                false,
            ),
            (
                json!({"phase": "Pending", "reason": "Refused", "conditions": [condition("Created", "False", "Refused", "creating a pod was refused: exceeded quota: few")]}),
                &["exceeded quota: few"],
                "kubectl describe resourcequota",
                true,
            ),
            (
                json!({"phase": "Failed", "reason": "MaxRestartsExceeded", "lastFailure": first, "conditions": [condition("Failed", "True", "MaxRestartsExceeded", "spec.failurePolicy.maxRestarts is 0")]}),
                &[
                    "maxRestarts is 0",
                    "began with mnist-trainer-1: trainer 1 needed more memory",
                    "last lines of mnist-trainer-1",
                    "  loading",
                ],
                "kubectl psjob logs mnist --rank 2",
                true,
            ),
            (
                json!({"phase": "Stalled", "reason": "Stalled", "conditions": [condition("Stalled", "True", "Stalled", "it has made no step for 60 s")]}),
                &["mnist is Stalled.", "no step for 60 s"],
                "kubectl psjob logs mnist --follow",
                true,
            ),
            (
                json!({"phase": "Restarting", "reason": "NodeLost", "lastFailure": first, "conditions": [
                    condition("Running", "False", "NodeLost", "trainer 1 waits for a pod"),
                    condition("Restarting", "True", "NodeLost", "trainer 1 was lost with worker-1"),
                ]}),
                &["lost with worker-1", "began with mnist-trainer-1", "waits for a pod"],
                "kubectl get pods",
                false,
            ),
            (
                json!({"phase": "Running", "reason": "Running", "restarts": 2, "lastFailure": first,
                    "conditions": [condition("Running", "True", "Running", "all run"), condition("Shrunk", "True", "Shrunk", "2 of 3 trainers go on")],
                    "progress": {"step": 788, "totalSteps": 1500, "percent": 52, "summary": "52%", "examplesPerSecond": 641.53,
                        "estimatedRemainingSeconds": 100, "stragglers": ["mnist-trainer-0"]}}),
                &[
                    "step 788 of 1500 (52%), 641.5 examples/s, about 100s left",
                    "slower than the other trainers: mnist-trainer-0",
                    "2 of 3 trainers go on",
                    "2 of its pods were replaced",
                ],
                "kubectl psjob watch mnist",
                false,
            ),
            (
                json!({"phase": "Running", "reason": "Running", "conditions": [condition("Running", "True", "Running", "all run")]}),
                &["run since 5m, and no step"],
                "kubectl psjob watch mnist",
                false,
            ),
            (
                json!({"phase": "Suspended", "reason": "Suspended"}),
                &["no pods until it is resumed"],
                "kubectl psjob resume mnist",
                false,
            ),
        ];
        for (status, words, command, needs_help) in cases {
            let said = explain(&job(status), "2026-01-01T00:05:00Z".parse().expect("a time"));
            let text = said.as_text(&Flags::default());
            for word in words {
                assert!(text.contains(word), "{word:?} is not in\n{text}");
            }
            assert!(said.next[0].0.starts_with(command), "{command:?} is not first in\n{text}");
            assert_eq!(said.needs_help, needs_help, "{text}");
        }
    }

    #[test]
    fn a_model_is_named_with_its_volume_and_metric() {
        let status = json!({"phase": "Succeeded", "reason": "Succeeded", "startTime": "2026-01-01T00:00:00Z",
            "completionTime": "2026-01-01T00:07:05Z", "model": {"path": "mnist/model.safetensors", "metric": {"name": "accuracy", "value": 0.9812}}});
        let text = explain(&job(status), "2026-01-02T00:00:00Z".parse().expect("a time")).as_text(&Flags::default());
        assert!(text.contains("It took 7m5s."), "{text}");
        assert!(
            text.contains("mnist/model.safetensors on the volume claim mnist-checkpoints (accuracy 0.9812)"),
            "{text}"
        );
    }

    #[test]
    fn a_job_of_another_manager_needs_no_help() {
        let mut job = job(Value::Null);
        job.spec.managed_by = Some("kueue.x-k8s.io/multikueue".into());
        let said = explain(&job, Timestamp::UNIX_EPOCH);
        assert!(
            !said.needs_help && said.as_text(&Flags::default()).contains("leaves it to kueue.x-k8s.io/multikueue"),
            "{said:?}"
        );
    }

    #[test]
    fn commands_carry_the_flags_of_the_cluster() {
        let flags = Flags { namespace: " --namespace a".into(), cluster: " --context b".into() };
        let said = explain(&job(json!({"phase": "Suspended", "reason": "Suspended"})), Timestamp::UNIX_EPOCH);
        let command = "kubectl psjob resume mnist --namespace a --context b";
        assert!(said.as_text(&flags).contains(command));
        assert_eq!(said.as_json(&flags)["next"][0]["command"], command);
        let of_all = flags.behind("kubectl get pods --all-namespaces");
        assert_eq!(of_all, "kubectl get pods --all-namespaces --context b");
    }

    #[test]
    fn a_new_job_needs_no_help() {
        let said = explain(&job(Value::Null), "2026-01-01T00:00:05Z".parse().expect("a time"));
        assert!(!said.needs_help && said.as_text(&Flags::default()).starts_with("mnist is new."), "{said:?}");
    }
}
