//! Explains the status of a job in sentences and commands.

use jiff::Timestamp;
use psjobs_api::crd::names::{LABEL_JOB, LABEL_SHARD};
use psjobs_api::crd::{ConditionType, JobCondition, MANAGER, ParameterServerJob, ParameterServerJobStatus, Phase};
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
    checkpoints(status, &mut said);
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
        Phase::Pending | Phase::Restarting => waits(job, status, phase, &mut said),
        Phase::Running | Phase::Completing => runs(status, phase, now, &mut said),
    }
    said
}

/// Seconds after which a job that reports no step is looked into: a trainer says then that it waits.
const SILENT: i64 = 60;

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
        let claim = job.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.claim(&said.job));
        // In an object store the path is the whole place.
        let claim = claim.map(|claim| format!(" on the volume claim {claim}")).unwrap_or_default();
        said.sentences.push(format!("Its model is {}{claim}{metric}.", model.path));
    }
}

/// The job has not all the pods that it needs.
fn waits(job: &ParameterServerJob, status: &ParameterServerJobStatus, phase: Phase, said: &mut Explanation) {
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
    let (reason, message) = blocking.map_or(("", ""), |found| (&*found.reason, &*found.message));
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
            let gpus = &job.spec.trainer.gpu_resource_name;
            if message.contains(&format!("Insufficient {gpus}")) {
                said.sentences.push(format!(
                    "If no node has any {gpus} at all, its device plugin does not run, or gives GPUs another name \
                     (spec.trainer.gpuResourceName)."
                ));
            }
            said.next.push(("kubectl describe nodes".into(), "what each node has, and who uses it"));
            said.next.extend(correct);
        }
        "Refused" => {
            said.needs_help = true;
            if message.contains("quota") {
                said.next.push(("kubectl describe resourcequota".into(), "what is used"));
            }
            said.next.push((format!("kubectl describe psjob {name}"), "since when, and how often it was refused"));
            said.next.extend(correct);
        }
        _ => {
            said.next.push((pods(&name), "its pods"));
            said.next.push((format!("kubectl describe psjob {name}"), "its events"));
        }
    }
}

/// The servers cannot write checkpoints. The condition does not hold any more when the job has ended or is suspended.
fn checkpoints(status: &ParameterServerJobStatus, said: &mut Explanation) {
    let Some(failing) = message(status, ConditionType::CheckpointFailing) else { return };
    said.needs_help = true;
    said.sentences.push(failing);
    if let Some(newest) = &status.last_checkpoint {
        said.sentences.push(format!("Its newest checkpoint is of step {}.", newest.step));
    }
    said.next.push((format!("kubectl psjob logs {} --role ps --tail 20", said.job), "what the servers say of it"));
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
            let condition = find(status, ConditionType::Running);
            let running = condition.map(|running| &running.last_transition_time);
            let since = running.map(|since| format!(" since {}", text::age(Some(since), now))).unwrap_or_default();
            let lacks_pods = condition.is_some_and(|running| running.message.contains("cannot start"));
            let pods = if lacks_pods { "As many of its pods as it needs" } else { "All of its pods" };
            said.sentences.push(format!("{pods} run{since}, and no step is reported yet."));
            if running.is_some_and(|running| now.duration_since(running.0).as_secs() >= SILENT) {
                said.sentences.push("A process that waits for another one says so in its log, every 30 s.".into());
                said.next.push((format!("kubectl psjob logs {name} --since 2m"), "which process waits for which"));
            }
        }
    }
    if let Some(shrunk) = message(status, ConditionType::Shrunk) {
        said.sentences.push(shrunk);
        if let Some(first) = &status.last_failure {
            said.next
                .push((format!("kubectl psjob logs {name} --rank {}", first.rank), "why the last one of them failed"));
        }
    }
    if let Some(running) =
        find(status, ConditionType::Running).filter(|running| running.message.contains("cannot start"))
    {
        said.sentences.push(text::sentence(&running.message));
    }
    if status.restarts > 0 {
        let first = status.last_failure.as_ref();
        let first = first.map(|first| format!("; the first trouble was {}: {}", first.pod, first.message));
        let replaced = match status.restarts {
            1 => "1 of its pods was replaced".to_owned(),
            restarts => format!("{restarts} of its pods were replaced"),
        };
        said.sentences.push(text::sentence(&(replaced + &first.unwrap_or_default())));
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
mod tests;
