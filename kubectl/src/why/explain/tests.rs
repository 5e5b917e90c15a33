//! Each cause is named, with a command to type.

use std::collections::{BTreeMap, BTreeSet};

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

/// The sections of docs/troubleshooting.md by their headings.
fn sections() -> BTreeMap<&'static str, &'static str> {
    let page = include_str!("../../../../docs/troubleshooting.md");
    page.split("\n## ").skip(1).filter_map(|section| section.split_once('\n')).collect()
}

/// The outputs in a section: its blocks of code in no language.
fn outputs(section: &'static str) -> impl Iterator<Item = &'static str> {
    section.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix('\n'))
}

/// The line of a section's outputs that has these words.
fn line(section: &'static str, words: &str) -> &'static str {
    let line = outputs(section).flat_map(str::lines).find(|line| line.contains(words));
    line.unwrap_or_else(|| panic!("no output has {words:?} in\n{section}"))
}

/// The conditions and the first failure that a section shows of `kubectl describe`.
fn described(section: &'static str) -> (Vec<Value>, Option<Value>) {
    let (mut conditions, mut first) = (Vec::new(), None);
    for output in outputs(section) {
        let fields: BTreeMap<_, _> = output.lines().filter_map(|line| line.split_once(':')).collect();
        let fields: BTreeMap<_, _> = fields.into_iter().map(|(key, value)| (key.trim(), value.trim())).collect();
        let Some(&message) = fields.get("Message") else { continue };
        if let Some(type_) = fields.get("Type") {
            conditions.push(condition(type_, fields["Status"], fields["Reason"], message));
        } else {
            first = Some(
                json!({"pod": fields["Pod"], "role": fields["Role"], "rank": fields["Rank"].parse::<u32>().expect("a rank"),
                "exitCode": 137, "reason": fields["Reason"], "message": message, "logTail": fields["Log Tail"]}),
            );
        }
    }
    (conditions, first)
}

/// A job that shows what a section of docs/troubleshooting.md shows is explained with the section's cause and advice. Each row
/// has a section, the job's phase, words of the explanation, the beginning of the first command, and whether somebody
/// has to do something.
#[test]
fn every_section_of_troubleshooting_has_its_explanation() {
    type Row = (&'static str, &'static str, &'static [&'static str], &'static str, bool);
    let rows: [Row; 11] = [
        (
            "The image does not exist",
            "Pending",
            &["mnist is Pending (ErrImagePull).", "psjobs-worker:of-next-year", "a misspelt name or tag"],
            "kubectl psjob suspend mnist",
            true,
        ),
        (
            "No GPU is free",
            "Pending",
            &["1 Insufficient nvidia.com/gpu", "no node has any nvidia.com/gpu at all", "spec.trainer.gpuResourceName"],
            "kubectl describe nodes",
            true,
        ),
        (
            "No node is large enough",
            "Pending",
            &["2 Insufficient cpu", "ask for less, or add a node or a toleration"],
            "kubectl describe nodes",
            true,
        ),
        (
            "Too little memory",
            "Failed",
            &["The trouble began with mnist-trainer-1", "raise resources.limits.memory", "world_size=3"],
            "kubectl psjob logs mnist --rank 2",
            true,
        ),
        (
            "A flag is wrong or data is missing",
            "Failed",
            &[
                "mnist is Failed (WrongInput).",
                "wrong input, so it is not started again",
                "--set FIELD=VALUE changes it",
            ],
            "kubectl psjob clone mnist mnist-again",
            true,
        ),
        (
            "A server or the trainers are away",
            "Running",
            &["no step is reported yet", "waits for another one says so in its log"],
            "kubectl psjob logs mnist --since 2m",
            false,
        ),
        ("A quota is full", "Pending", &["exceeded quota: few"], "kubectl describe resourcequota", true),
        (
            "A scheduler is not installed",
            "Pending",
            &["install Volcano, or suspend the job and remove the backend", "kubectl edit psjob mnist"],
            "kubectl describe psjob mnist",
            true,
        ),
        (
            "A node died",
            "Restarting",
            &["Trainer 1 was lost with worker-1, a node that has not answered"],
            "kubectl get pods",
            false,
        ),
        (
            "Checkpoints cannot be written",
            "Running",
            &["check the credentials of the store", "training goes on", "what the servers say of it"],
            "kubectl psjob logs mnist --role ps",
            true,
        ),
        (
            "An elastic job has fewer trainers than it asks for",
            "Running",
            &[
                "given up until the job is scaled or changed, and 2 of 3 trainers go on",
                "why the last one of them failed",
            ],
            "kubectl psjob logs mnist --rank 3",
            false,
        ),
    ];
    let sections = sections();
    let covered: BTreeSet<_> = rows.iter().map(|(section, ..)| *section).collect();
    assert_eq!(covered, sections.keys().copied().collect(), "each section has a row");
    for (section, phase, words, command, needs_help) in rows {
        let text = sections[section];
        let (mut conditions, first) = described(text);
        let mut status = json!({"phase": phase});
        match section {
            "A server or the trainers are away" => conditions.push(condition("Running", "True", "Running", "all run")),
            "A scheduler is not installed" => {
                conditions.push(condition("Created", "False", "Refused", line(text, "creating podgroup")));
            }
            "A node died" => {
                let (_, message) = line(text, "PodLost").split_once("psjobs-operator  ").expect("a source");
                conditions.push(condition("Restarting", "True", "PodLost", message));
            }
            "An elastic job has fewer trainers than it asks for" => {
                conditions.push(condition("Shrunk", "True", "Shrunk", line(text, "is given up")));
                status["lastFailure"] = json!({"pod": "mnist-trainer-2", "role": "trainer", "rank": 3,
                    "exitCode": 3, "reason": "Error", "message": "trainer 2 ended with exit code 3"});
            }
            "Too little memory" => {
                let why = "spec.failurePolicy.maxRestarts is 0";
                conditions.push(condition("Failed", "True", "MaxRestartsExceeded", why));
            }
            _ => {}
        }
        status["reason"] = conditions[0]["reason"].clone();
        status["conditions"] = conditions.into();
        if let Some(first) = first {
            status["lastFailure"] = first;
        }
        check(status, words, command, needs_help);
    }
}

/// Checks the explanation of a status, by `why` and at the top of the page: its words, the beginning of its first command, and whether somebody has to do something.
fn check(status: Value, words: &[&str], command: &str, needs_help: bool) {
    let (job, now) = (job(status), "2026-01-01T00:05:00Z".parse().expect("a time"));
    let said = explain(&job, now);
    let text = said.as_text(&Flags::default());
    for word in words {
        assert!(text.contains(word), "{word:?} is not in\n{text}");
    }
    assert!(said.next[0].0.starts_with(command), "{command:?} is not first in\n{text}");
    assert_eq!(said.needs_help, needs_help, "{text}");
    // The page begins with the same.
    let page = crate::web::page::explanation(&job, &Flags::default(), now);
    assert_eq!((&page.sentences, page.needs_help), (&said.sentences, needs_help));
    assert!(page.commands[0].command.starts_with(command), "{:?}", page.commands);
    assert_eq!(page.log.map(|log| (log.process, log.text)), said.log);
}

/// A status, words of the explanation, the beginning of the first command, and whether somebody has to do something.
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
            "kubectl psjob logs mnist --rank 2",
            false,
        ),
        (
            json!({"phase": "Running", "reason": "Running", "conditions": [condition("Running", "True", "Running", "all run")]}),
            &["All of its pods run since 5m, and no step", "says so in its log"],
            "kubectl psjob logs mnist --since 2m",
            false,
        ),
        (
            json!({"phase": "Running", "reason": "Running", "conditions": [condition("Running", "True", "Running",
                "all servers and 1 of 2 trainers run; trainer 1 cannot start: 2 Insufficient cpu")]}),
            &["As many of its pods as it needs run since 5m", "trainer 1 cannot start: 2 Insufficient cpu"],
            "kubectl psjob logs mnist --since 2m",
            false,
        ),
        (
            json!({"phase": "Running", "reason": "Running", "lastCheckpoint": {"step": 400, "path": "s3://bucket/jobs/mnist/run-00001/step-000000000400"},
            "conditions": [
                condition("Running", "True", "Running", "all run"),
                condition("CheckpointFailing", "True", "CheckpointFailing", "no checkpoint can be written: SlowDown"),
            ]}),
            &["No checkpoint can be written: SlowDown.", "newest checkpoint is of step 400", "no step is reported yet"],
            "kubectl psjob logs mnist --role ps",
            true,
        ),
        (
            json!({"phase": "Running", "reason": "Running", "progress": {"step": 788, "totalSteps": 1500, "percent": 52, "summary": "52%"},
            "conditions": [
                condition("Running", "True", "Running", "all run"),
                condition("CheckpointFailing", "False", "CheckpointWritten", ""),
            ]}),
            &["step 788 of 1500"],
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
        check(status, words, command, needs_help);
    }
}

#[test]
fn a_model_is_named_with_its_place_and_metric() {
    let status = json!({"phase": "Succeeded", "reason": "Succeeded", "startTime": "2026-01-01T00:00:00Z",
        "completionTime": "2026-01-01T00:07:05Z", "model": {"path": "mnist/model.safetensors", "metric": {"name": "accuracy", "value": 0.9812}}});
    for (checkpoint, place) in [
        (json!({"volumeClaim": {"size": "1Gi"}}), " on the volume claim mnist-checkpoints"),
        (json!({"existingClaim": "shared"}), " on the volume claim shared"),
        (json!({"objectStore": {"url": "s3://bucket"}}), ""),
    ] {
        let mut job = job(status.clone());
        job.spec.checkpoint = serde_json::from_value(checkpoint).expect("a checkpoint");
        let text = explain(&job, "2026-01-02T00:00:00Z".parse().expect("a time")).as_text(&Flags::default());
        assert!(text.contains("It took 7m5s."), "{text}");
        assert!(text.contains(&format!("mnist/model.safetensors{place} (accuracy 0.9812).")), "{text}");
    }
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
