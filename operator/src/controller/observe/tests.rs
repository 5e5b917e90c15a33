//! Pods as kubelets report them, and what they mean.

use super::*;

/// A trainer pod with a memory limit; `status` and `metadata` are YAML in braces.
fn observe_pod(metadata: &str, status: &str) -> ObservedPod {
    let yaml = format!(
        r"
metadata:
  name: mnist-trainer-1
  uid: u1
  creationTimestamp: 2026-01-01T00:00:00Z
  labels: {{psjobs.dev/role: trainer, psjobs.dev/index: '1'}}
  annotations: {{other: text, psjobs.dev/incarnation: '2', psjobs.dev/failures: '1'}}
  {metadata}
spec:
  nodeName: n1
  initContainers: [{{name: fetch, image: i}}]
  containers:
    - {{name: trainer, image: i, resources: {{limits: {{memory: 512Mi}}}}}}
    - {{name: sidecar, image: i}}
status: {status}"
    );
    let pod: Pod = serde_yaml::from_str(&yaml).expect("a pod");
    let (replica, observed) = observe(&pod).expect("labelled");
    assert_eq!(replica, Replica::trainer(1));
    assert_eq!(observe_server_beside(&pod), None);
    observed
}

fn failure_of(metadata: &str, status: &str) -> Failure {
    match observe_pod(metadata, status).phase {
        PodPhase::Failed(failure) => failure,
        phase => panic!("{status}: {phase:?}"),
    }
}

const RUNS: &str = "state: {running: {}}";

fn ended(code: i32, more: &str) -> String {
    format!("state: {{terminated: {{exitCode: {code}, finishedAt: 2026-01-01T00:01:00Z{more}}}}}")
}

fn containers(phase: &str, trainer: &str, sidecar: &str) -> String {
    let common = "image: i, imageID: i, ready: true, restartCount: 0";
    format!(
        "{{phase: {phase}, containerStatuses: [{{name: sidecar, {common}, {sidecar}}}, {{name: trainer, {common}, {trainer}}}]}}"
    )
}

fn time(text: &str) -> Timestamp {
    text.parse().expect("a time")
}

#[test]
fn the_main_container_judges_the_pod() {
    let rows = [
        ("both run", containers("Running", RUNS, RUNS), "Running", true),
        ("the sidecar goes on", containers("Running", &ended(0, ""), RUNS), "Succeeded", true),
        ("the sidecar goes on after a failure", containers("Running", &ended(1, ""), RUNS), "Failed", true),
        ("the sidecar failed", containers("Failed", &ended(0, ""), &ended(1, "")), "Succeeded", false),
        ("only the sidecar ended", containers("Running", RUNS, &ended(1, "")), "Running", true),
        ("both ended, the phase is late", containers("Running", &ended(0, ""), &ended(0, "")), "Succeeded", false),
        ("not scheduled yet", "{phase: Pending}".into(), "Pending", true),
        ("containers unknown, phase final", "{phase: Succeeded}".into(), "Succeeded", false),
        ("nothing known", "{}".into(), "Pending", true),
    ];
    for (label, status, want, alive) in rows {
        let pod = observe_pod("", &status);
        let phase = format!("{:?}", pod.phase);
        assert!(phase.starts_with(want), "{label}: {phase}");
        assert_eq!(pod.alive, alive, "{label}");
        assert_eq!((pod.incarnation, pod.failures), (2, 1), "{label}");
    }
}

#[test]
fn a_result_is_read_from_the_termination_message() {
    let message = r#", message: '{"steps":9,"examples":288,"seconds":1.5,"metrics":{"accuracy":0.98}}'"#;
    let PodPhase::Succeeded { at, result } = observe_pod("", &containers("Succeeded", &ended(0, message), RUNS)).phase
    else {
        panic!("it succeeded")
    };
    assert_eq!(at, time("2026-01-01T00:01:00Z"));
    assert_eq!(result.expect("parsed").metrics["accuracy"], 0.98);
}

#[test]
fn a_failure_says_what_happened() {
    let oom = ended(137, ", reason: OOMKilled");
    let log = ended(2, ", reason: Error, message: \"step 3\\nError: no such file\\n\"");
    let rows = [
        (containers("Failed", &log, RUNS), Some(2), "Error", "ended with exit code 2"),
        (containers("Failed", &ended(139, ", reason: Error"), RUNS), Some(139), "Error", "killed by signal 11"),
        (containers("Failed", &oom, RUNS), Some(137), "OOMKilled", "more memory than the limit of 512Mi"),
        (
            containers("Failed", &ended(137, ", reason: Error"), RUNS),
            Some(137),
            "Error",
            "to the limit of 512Mi, raise",
        ),
    ];
    for (status, code, reason, what) in rows {
        let failure = failure_of("", &status);
        assert!(!failure.disruption, "{reason}");
        assert_eq!((failure.exit_code, failure.reason.as_str()), (code, reason));
        assert!(failure.what.contains(what), "{}", failure.what);
        assert_eq!(failure.at, time("2026-01-01T00:01:00Z"));
    }
    let failure = failure_of("", &containers("Failed", &log, RUNS));
    assert_eq!((failure.log_tail.as_str(), failure.of_init_container), ("step 3\nError: no such file", false));
}

#[test]
fn an_init_container_that_failed_is_named() {
    let common = "image: i, imageID: i, ready: false, restartCount: 0";
    let status = format!(
        "{{phase: Failed, initContainerStatuses: [{{name: fetch, {common}, {}}}], \
         containerStatuses: [{{name: trainer, {common}, state: {{waiting: {{reason: PodInitializing}}}}}}]}}",
        ended(4, ", message: no route to host")
    );
    let failure = failure_of("", &status);
    assert_eq!((failure.disruption, failure.exit_code, failure.of_init_container), (false, Some(4), true));
    assert_eq!(failure.what, "could not start, init container fetch ended with exit code 4");
    assert_eq!(failure.log_tail, "no route to host");
}

#[test]
fn what_kubernetes_did_is_a_disruption() {
    let killed = ended(143, ", reason: Error");
    let target =
        "conditions: [{type: DisruptionTarget, status: 'True', reason: PreemptionByScheduler, message: make room}]";
    let preempted = containers("Failed", &killed, RUNS).replacen("{phase", &format!("{{{target}, phase"), 1);
    let rows = [
        ("", preempted, "PreemptionByScheduler", "taken away by Kubernetes (PreemptionByScheduler: make room)"),
        ("deletionTimestamp: 2026-01-01T00:00:30Z", containers("Failed", &killed, RUNS), "PodDeleted", "was deleted"),
        ("", "{phase: Failed, reason: Evicted, message: out of disk}".into(), "Evicted", "(Evicted: out of disk)"),
        (
            "",
            "{phase: Failed, reason: UnexpectedAdmissionError}".into(),
            "UnexpectedAdmissionError",
            "stopped by its node",
        ),
        ("", containers("Failed", &ended(255, ", reason: Unknown"), RUNS), "NodeRestarted", "ended with its node"),
        (
            "",
            containers("Failed", &ended(137, ", reason: ContainerStatusUnknown"), RUNS),
            "NodeRestarted",
            "ended with",
        ),
    ];
    for (metadata, status, reason, what) in rows {
        let failure = failure_of(metadata, &status);
        assert!(failure.disruption, "{reason}");
        assert_eq!(failure.reason, reason);
        assert!(failure.what.contains(what), "{}", failure.what);
    }
}

#[test]
fn a_deleted_pod_is_known_by_its_deadline() {
    let pod = observe_pod("deletionTimestamp: 2026-01-01T00:00:30Z", &containers("Running", RUNS, RUNS));
    assert_eq!(pod.deletion_deadline, Some(time("2026-01-01T00:00:30Z")));
    assert_eq!(pod.phase, PodPhase::Running);
}

#[test]
fn obstacles_are_those_that_time_alone_does_not_remove() {
    let common = "name: trainer, image: i, imageID: i, ready: false, restartCount: 0";
    let waits = |reason: &str| {
        format!(
            "{{phase: Pending, containerStatuses: [{{{common}, state: {{waiting: {{reason: {reason}, message: why}}}}}}]}}"
        )
    };
    let unschedulable = "{phase: Pending, conditions: \
                         [{type: PodScheduled, status: 'False', reason: Unschedulable, message: why}]}";
    let rows = [
        (waits("ContainerCreating"), None),
        (waits("PodInitializing"), None),
        (waits("ImagePullBackOff"), Some("ImagePullBackOff")),
        (waits("CreateContainerConfigError"), Some("CreateContainerConfigError")),
        (unschedulable.to_owned(), Some("Unschedulable")),
        ("{phase: Pending}".to_owned(), None),
    ];
    for (status, want) in rows {
        let waiting_reason = observe_pod("", &status).waiting_reason;
        let want = want.map(|reason| WaitingReason {
            reason: reason.into(),
            message: "why".into(),
            unschedulable_since: None,
        });
        assert_eq!(waiting_reason, want, "{status}");
    }
}

#[test]
fn readiness_comes_from_the_probes() {
    for (value, ready) in [("'True'", true), ("'False'", false)] {
        let status = format!("{{phase: Running, conditions: [{{type: Ready, status: {value}}}]}}");
        assert_eq!(observe_pod("", &status).ready, ready);
    }
}

/// Reads a colocated pod with these containers: its first replica, and the server beside that.
fn observe_pair(containers: &str, status: &str) -> (Replica, ObservedPod, Option<(Replica, ObservedPod)>) {
    let yaml = format!(
        "metadata: {{name: mnist-trainer-1, uid: u1, creationTimestamp: 2026-01-01T00:00:00Z, \
         labels: {{psjobs.dev/role: trainer, psjobs.dev/index: '1', psjobs.dev/placement: Colocated}}, \
         annotations: {{psjobs.dev/incarnation: '2', psjobs.dev/failures: '1', psjobs.dev/server-failures: '4'}}}}\n\
         spec: {{containers: [{containers}]}}\nstatus: {status}"
    );
    let pod: Pod = serde_yaml::from_str(&yaml).expect("a pod");
    let (replica, observed) = observe(&pod).expect("labelled");
    (replica, observed, observe_server_beside(&pod))
}

#[test]
fn each_program_of_a_colocated_pod_is_judged_by_its_own_container() {
    const BOTH: &str = "{name: t, image: i}, {name: sidecar, image: i}, {name: psjobs-server, image: i}";
    let status = |phase: &str, conditions: &str, containers: &[(&str, &str, bool)]| {
        let one = |(name, state, ready): &(&str, &str, bool)| {
            format!("{{name: {name}, image: i, imageID: i, ready: {ready}, restartCount: 0, {state}}}")
        };
        let containers = containers.iter().map(one).collect::<Vec<_>>().join(", ");
        format!("{{phase: {phase}, conditions: [{conditions}], containerStatuses: [{containers}]}}")
    };
    let (good, bad) = (ended(0, ""), ended(1, ""));
    let (good, bad) = (good.as_str(), bad.as_str());
    let waits = "state: {waiting: {reason: ErrImagePull, message: why}}";
    // Each row has the states of trainer, sidecar and server; phase, ready and alive of the trainer and of the server.
    let rows = [
        ("all run", [RUNS, RUNS, RUNS], ("Running", true, true), ("Running", true, true)),
        ("the trainer is done", [good, good, RUNS], ("Succeeded", false, false), ("Running", true, true)),
        ("the sidecar goes on", [good, RUNS, good], ("Succeeded", false, true), ("Succeeded", false, false)),
        ("the trainer failed", [bad, RUNS, RUNS], ("Failed", false, true), ("Running", true, true)),
        ("the server failed", [RUNS, RUNS, bad], ("Running", true, true), ("Failed", false, false)),
        ("the server has no image", [RUNS, RUNS, waits], ("Running", true, true), ("Pending", false, true)),
    ];
    for (label, states, of_trainer, of_server) in rows {
        let named = ["t", "sidecar", "psjobs-server"].into_iter().zip(states);
        let containers = named.map(|(name, state)| (name, state, state == RUNS)).collect::<Vec<_>>();
        let (replica, trainer, server) = observe_pair(BOTH, &status("Running", "", &containers));
        let (beside, server) = server.expect("a server");
        assert_eq!((replica, beside), (Replica::trainer(1), Replica::server(1)), "{label}");
        for (observed, (phase, ready, alive)) in [(&trainer, of_trainer), (&server, of_server)] {
            assert!(format!("{:?}", observed.phase).starts_with(phase), "{label}: {observed:?}");
            assert_eq!((observed.ready, observed.alive), (ready, alive), "{label}: {observed:?}");
        }
        assert_eq!((trainer.failures, server.failures, server.incarnation), (1, 4, 2), "{label}");
        assert_eq!(trainer.waiting_reason, None, "{label}");
        assert_eq!(server.waiting_reason.is_some(), states[2] == waits, "{label}");
    }
    let silent = "{type: ContainersReady, status: 'True'}, {type: Ready, status: 'False'}";
    let containers = [("t", RUNS, true), ("psjobs-server", RUNS, true)];
    let (_, trainer, server) = observe_pair(BOTH, &status("Running", silent, &containers));
    assert!(!trainer.ready && !server.expect("a server").1.ready, "its node is silent");
    let (replica, server, none) =
        observe_pair("{name: psjobs-server, image: i}", &status("Running", "", &[("psjobs-server", RUNS, true)]));
    assert_eq!((replica, none, server.failures), (Replica::server(1), None, 4), "its trainer is done");
}
