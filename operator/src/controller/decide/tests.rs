//! Behaviours, one test each, on a small cluster that carries out each decision. The last file throws
//! random histories at it.

mod cases;
mod checkpoints;
mod cluster;
mod colocated;
mod elastic;
mod end;
mod failure;
mod history;
mod policies;

use std::sync::Arc;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_api::{CheckpointResult, ReplicaResult, Role};

use self::cluster::Cluster;
use super::*;
use crate::controller::fixtures::{at, job, pod, replica, valid_job};
use crate::controller::model::{Child, Deletion, NewPod, ProgressReport, Refusal};
use crate::controller::observe::{ObservedPod, PodPhase, Replica};
use crate::controller::validate::validate;

/// A cluster whose job runs.
fn running(spec: &str) -> Cluster {
    let mut cluster = Cluster::new(spec);
    cluster.reconcile();
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    cluster
}

#[test]
fn all_pods_are_created_at_once_and_counted_in_the_same_reconcile() {
    let mut cluster = Cluster::new("ps: {replicas: 2}");
    cluster.reconcile();
    assert_eq!(cluster.pods(), ["ps-0", "ps-1", "trainer-0", "trainer-1"]);
    assert!(cluster.observed.service);
    assert_eq!(cluster.phase(), Phase::Pending);
    assert!(conditions::holds(&cluster.status, ConditionType::Created));
    assert_eq!(cluster.events, ["Created: Created the service and the pods of 2 servers and 2 trainers"]);
}

#[test]
fn a_first_status_may_wait_unless_there_is_something_to_report() {
    let waiting_reason = crate::controller::observe::WaitingReason {
        reason: "ErrImagePull".into(),
        message: "not found".into(),
        unschedulable_since: None,
    };
    let passing = |change: &dyn Fn(&mut Cluster)| {
        let mut cluster = Cluster::new("");
        cluster.reconcile();
        change(&mut cluster);
        cluster.reconcile().transient_for.is_some()
    };
    let begin = |cluster: &mut Cluster| cluster.status = ParameterServerJobStatus::default();
    assert!(passing(&begin));
    assert!(!passing(&|_| ()), "it is written already");
    let refuse = |cluster: &mut Cluster| {
        *cluster = Cluster::new("");
        cluster.refuse = Some("exceeded quota".into());
    };
    assert!(!passing(&refuse), "refused");
    let cannot_start = |cluster: &mut Cluster| {
        begin(cluster);
        cluster.edit("ps-0", |pod| ObservedPod { waiting_reason: Some(waiting_reason.clone()), ..pod });
    };
    assert!(!passing(&cannot_start), "a pod cannot start");
    let run = |cluster: &mut Cluster| {
        begin(cluster);
        cluster.run_all();
    };
    assert!(!passing(&run), "it runs");
}

#[test]
fn a_job_begins_when_it_is_created_but_its_clock_is_not_trusted_far() {
    // When it was created, and when it began by what is reported at second 100.
    for (created, begun) in [(99, 99), (93, 93), (40, 93), (130, 100)] {
        let mut cluster = Cluster::new("");
        Arc::make_mut(&mut cluster.job.object).metadata.creation_timestamp = Some(Time(at(created)));
        cluster.pass(100);
        cluster.reconcile();
        assert_eq!(cluster.status.start_time, Some(Time(at(begun))), "created at {created}");
    }
}

#[test]
fn phases_follow_the_pods() {
    // Pods in the order ps-0, trainer-0, trainer-1.
    type Make = fn(ObservedPod) -> ObservedPod;
    let pending: Make = |pod| pod;
    let runs: Make = ObservedPod::running;
    let starting: Make = |pod| ObservedPod { ready: false, ..pod.running() };
    let done: Make = |pod| pod.succeeded(5);
    let fails: Make = |pod| pod.failed(5, 1);
    let rows = [
        ("nothing runs", [pending, pending, pending], Phase::Pending, "WaitingForPods", "0/1", "0/2"),
        ("a server is not ready", [starting, runs, runs], Phase::Pending, "WaitingForServers", "0/1", "2/2"),
        ("a trainer is missing", [runs, runs, pending], Phase::Pending, "WaitingForPods", "1/1", "1/2"),
        ("all run", [runs, runs, runs], Phase::Running, "Running", "1/1", "2/2"),
        ("one trainer is done", [runs, done, runs], Phase::Running, "Running", "1/1", "2/2"),
        ("a trainer failed", [runs, fails, runs], Phase::Restarting, "Error", "1/1", "1/2"),
        ("a server failed", [fails, runs, runs], Phase::Restarting, "Error", "0/1", "2/2"),
        ("all trainers are done", [runs, done, done], Phase::Completing, "WaitingForServers", "1/1", "2/2"),
        ("everything is done", [done, done, done], Phase::Succeeded, "TrainersSucceeded", "0/1", "2/2"),
    ];
    for (label, make, phase, reason, servers, trainers) in rows {
        let names = ["ps-0", "trainer-0", "trainer-1"].map(replica);
        let pods = names.into_iter().zip(make).map(|(replica, make)| (replica, make(pod(replica)))).collect();
        let observed = ObservedState { pods, service: true, ..ObservedState::default() };
        let decision = decide(&valid_job(""), &ParameterServerJobStatus::default(), &observed, at(6));
        let status = decision.status;
        let summary = |of_role: &Option<psjobs_api::crd::RoleStatus>| of_role.as_ref().expect(label).summary.clone();
        assert_eq!(status.phase, Some(phase), "{label}");
        assert_eq!(status.reason.as_deref(), Some(reason), "{label}");
        assert_eq!((summary(&status.ps), summary(&status.trainer)), (servers.into(), trainers.into()), "{label}");
        assert_eq!(status.observed_generation, Some(1), "{label}");
    }
}

#[test]
fn a_server_that_is_busy_for_a_moment_does_not_stop_the_job_from_running() {
    let mut cluster = running("");
    cluster.edit("ps-0", |pod| ObservedPod { ready: false, ..pod });
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    assert!(!conditions::holds(&cluster.status, ConditionType::ServersReady));
}

/// Kubernetes' own scheduler reports for one pod of a group why it finds no node, and for the others that they wait.
#[test]
fn of_pods_that_are_scheduled_together_the_one_that_finds_no_node_is_reported() {
    let mut cluster = Cluster::new("schedulingPolicy: {backend: Workload}");
    cluster.reconcile();
    for (pod, message) in [
        ("ps-0", "minCount (3) cannot be satisfied: 1 scheduled, 1 remaining"),
        ("trainer-0", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        ("trainer-1", "pod group is unschedulable, minCount (3) cannot be satisfied: 1 scheduled, 1 remaining"),
    ] {
        let (reason, unschedulable_since) = ("Unschedulable".to_owned(), Some(at(0)));
        let waiting_reason =
            crate::controller::observe::WaitingReason { reason, message: message.into(), unschedulable_since };
        cluster.edit(pod, |pod| ObservedPod {
            phase: PodPhase::Pending,
            waiting_reason: Some(waiting_reason.clone()),
            ..pod
        });
    }
    cluster.reconcile();
    let message = cluster.message(ConditionType::Running);
    assert_eq!(message, "trainer 0 cannot start: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
}

#[test]
fn what_keeps_a_pod_from_starting_is_reported_in_its_words() {
    let mut cluster = Cluster::new("");
    cluster.reconcile();
    cluster.run_all();
    let waiting_reason = crate::controller::observe::WaitingReason {
        reason: "Unschedulable".into(),
        message: "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.".into(),
        unschedulable_since: Some(at(0)),
    };
    cluster.edit("trainer-1", |pod| ObservedPod {
        phase: PodPhase::Pending,
        waiting_reason: Some(waiting_reason.clone()),
        ..pod
    });
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("Unschedulable"));
    let message = cluster.message(ConditionType::Running);
    assert_eq!(message, "trainer 1 cannot start: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
}

#[test]
fn a_role_is_counted_by_what_its_pods_do() {
    let trainers = |cluster: &Cluster| {
        let counts = cluster.status.trainer.clone().expect("counted");
        assert!(counts.selector.contains("mnist") && counts.selector.contains("trainer"), "{}", counts.selector);
        let of_pods = [counts.desired, counts.ready, counts.active, counts.succeeded, counts.failed, counts.restarts];
        (of_pods, counts.summary)
    };
    let mut cluster = Cluster::new("");
    cluster.reconcile();
    assert_eq!(trainers(&cluster), ([2, 0, 2, 0, 0, 0], "0/2".to_owned()));
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(trainers(&cluster), ([2, 2, 2, 0, 0, 0], "2/2".to_owned()));
    cluster.succeed("trainer-0");
    cluster.reconcile();
    assert_eq!(trainers(&cluster), ([2, 1, 1, 1, 0, 0], "2/2".to_owned()), "one that is done counts as ready");
    cluster.fail("trainer-1", 1);
    cluster.settle();
    assert_eq!(trainers(&cluster), ([2, 0, 1, 1, 0, 1], "1/2".to_owned()), "it was replaced at once");
    cluster.fail("trainer-1", 1);
    cluster.reconcile();
    assert_eq!(trainers(&cluster), ([2, 0, 0, 1, 1, 1], "1/2".to_owned()), "the second time it waits");
    let servers = cluster.status.ps.clone().expect("counted");
    assert_eq!((servers.desired, servers.ready, servers.active, servers.summary.as_str()), (1, 1, 1, "1/1"));
    assert!(servers.selector.contains("mnist") && servers.selector.contains("ps"), "{}", servers.selector);
}

#[test]
fn progress_comes_from_server_0() {
    let mut cluster = running("training: {batch: {base: 10}}");
    cluster.observed.progress = Some(ProgressReport {
        step: 420,
        total_steps: 1000,
        examples_per_second: 58.04,
        metrics: [("loss".to_owned(), 0.25)].into(),
        ..ProgressReport::default()
    });
    cluster.reconcile();
    let progress = cluster.status.progress.clone().expect("reported");
    assert_eq!((progress.summary.as_str(), progress.step, progress.total_steps), ("42%", 420, 1000));
    assert_eq!(progress.examples_per_second, Some(58.0));
    assert_eq!(progress.estimated_remaining_seconds, Some(100));
}

#[test]
fn certificates_whose_name_is_taken_get_another_one() {
    let mut cluster = Cluster::new("");
    let refusal = Refusal { child: "secret mnist-tls-0b6c-0".into(), message: "it exists".into() };
    let next_certificates = Some("mnist-tls-0b6c-0-1f2e3d4c".to_owned());
    let observed = ObservedState { refused: vec![refusal], next_certificates, ..ObservedState::default() };
    let decision = decide(&cluster.job, &cluster.status, &observed, cluster.now);
    assert_eq!(decision.status.certificates.as_deref(), Some("mnist-tls-0b6c-0-1f2e3d4c"));
    cluster.status = decision.status;
    assert!(cluster.message(ConditionType::Created).contains("secret mnist-tls-0b6c-0 was refused: it exists"));
    let mut object = (*cluster.job.object).clone();
    object.status = Some(cluster.status);
    let job = validate(object.into()).expect("valid");
    assert_eq!(job.certificates().as_deref(), Some("mnist-tls-0b6c-0-1f2e3d4c"), "pods get what is on record");
}

#[test]
fn a_suspended_job_has_no_pods_and_starts_anew_when_resumed() {
    let mut cluster = running("runPolicy: {activeDeadlineSeconds: 50}");
    let certificates = |cluster: &Cluster| cluster.status.certificates.clone();
    assert_eq!(certificates(&cluster).as_deref(), Some("mnist-tls-0b6c-0"));
    cluster.succeed("trainer-0");
    cluster.fail("trainer-1", 1);
    cluster.settle();
    cluster.run_all();
    cluster.settle();
    assert_eq!(certificates(&cluster).as_deref(), Some("mnist-tls-0b6c-0"), "a pod alone gets those of the others");
    cluster.suspend(true);
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Suspended);
    assert_eq!(cluster.pods(), [""; 0]);
    assert_eq!(cluster.requeue, None, "no deadline runs");

    cluster.pass(1000);
    cluster.suspend(false);
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Pending);
    for who in ["ps-0", "trainer-0", "trainer-1"] {
        assert_eq!(cluster.incarnation(who), 2, "{who}: higher than any before, and trainer 0 works again");
    }
    assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (1, 1), "resuming is no restart");
    assert_eq!(certificates(&cluster).as_deref(), Some("mnist-tls-0b6c-2"));
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    assert!(!conditions::holds(&cluster.status, ConditionType::Suspended));
}

#[test]
fn a_job_born_suspended_waits() {
    let mut cluster = Cluster::new("suspend: true");
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.pods().len()), (Phase::Suspended, 0));
    assert_eq!(cluster.status.start_time, None);
    cluster.suspend(false);
    cluster.settle();
    assert_eq!(cluster.incarnation("trainer-0"), 0);
}

#[test]
fn refused_creates_are_reported_and_tried_again_until_they_work() {
    let mut cluster = Cluster::new("");
    cluster.refuse = Some("exceeded quota: pods".into());
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("Refused"));
    let message = cluster.message(ConditionType::Created);
    assert!(message.contains("exceeded quota: pods") && message.contains("mnist"), "{message}");
    assert_eq!(cluster.events.len(), 1, "{:?}", cluster.events);
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(1)));
    cluster.pass(10);
    cluster.reconcile();
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(10)), "less and less often");
    assert_eq!(cluster.events.len(), 1, "reported once");
    cluster.refuse = None;
    cluster.reconcile();
    assert!(conditions::holds(&cluster.status, ConditionType::Created));
    assert_eq!(cluster.incarnation("trainer-0"), 0, "a refused pod is no incarnation");
}

#[test]
fn a_deleted_service_comes_back() {
    let mut cluster = running("");
    cluster.observed.service = false;
    cluster.reconcile();
    assert!(cluster.observed.service);
    assert_eq!(cluster.status.restarts, 0);
}

#[test]
fn an_old_cache_makes_no_second_pod_and_counts_nothing() {
    let mut cluster = Cluster::new("");
    cluster.reconcile();
    cluster.run_all();
    let old = ObservedState::default();
    cluster.reconcile_on(old);
    assert_eq!((cluster.status.restarts, cluster.incarnation("trainer-0")), (0, 0));
    assert_eq!(cluster.phase(), Phase::Running);
}

#[test]
fn an_invalid_spec_is_reported_once_and_its_pods_are_left_alone() {
    let error = validate(job("ps: {replicas: 0}").into()).expect_err("invalid");
    let first = refuse(&error, &ParameterServerJobStatus::default(), Some(1), at(0));
    assert_eq!(first.status.reason.as_deref(), Some("InvalidSpec"));
    assert_eq!(first.events.len(), 1);
    let second = refuse(&error, &first.status, Some(1), at(5));
    assert_eq!((second.status, second.events), (first.status, vec![]));
}
