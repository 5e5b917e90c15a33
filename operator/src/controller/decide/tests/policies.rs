//! Tests of the spec's policies about success, failure, start and silence.

use super::*;
use crate::controller::observe::WaitingReason;

const ALL_PODS: [&str; 3] = ["ps-0", "trainer-0", "trainer-1"];

#[test]
fn the_success_policy_says_whose_success_is_the_jobs() {
    // Trainers that end well, and whether that is enough.
    let rows: [(&str, &[&str], bool); 7] = [
        ("{}", &["trainer-0"], false),
        ("{}", &["trainer-0", "trainer-1"], true),
        ("{operator: RankZero}", &["trainer-1"], false),
        ("{operator: RankZero}", &["trainer-0"], true),
        ("{operator: Any}", &["trainer-1"], true),
        ("{operator: Any, minSucceeded: 2}", &["trainer-1"], false),
        ("{operator: Any, minSucceeded: 2}", &["trainer-0", "trainer-1"], true),
    ];
    for (policy, done, enough) in rows {
        let mut cluster = running(&format!("successPolicy: {policy}"));
        done.iter().for_each(|who| cluster.succeed(who));
        cluster.reconcile();
        assert_eq!(cluster.phase() == Phase::Completing, enough, "{policy} with {done:?}");
    }
}

#[test]
fn what_still_runs_at_success_is_stopped_trainers_first() {
    let mut cluster = running("successPolicy: {operator: RankZero}");
    cluster.succeed("trainer-0");
    cluster.reconcile();
    assert_eq!(cluster.deleting(), ["trainer-1"]);
    // It goes on completing even if what was stopped ended badly, or is gone.
    cluster.edit("trainer-1", |pod| pod.failed_and_deleted(0));
    cluster.reconcile();
    assert_eq!(
        (cluster.phase(), cluster.deleting()),
        (Phase::Completing, vec!["ps-0".to_owned(), "trainer-1".to_owned()])
    );
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Succeeded);
    assert_eq!(cluster.message(ConditionType::Succeeded), "1 trainer ended well");
    assert_eq!((cluster.status.restarts_counted, cluster.history.len()), (0, 3), "nothing was started again");
}

#[test]
fn trainers_start_when_the_servers_are_ready_if_the_policy_says_so() {
    let mut cluster = Cluster::new("startupPolicy: ServersReady");
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0"]);
    assert!(cluster.message(ConditionType::Created).contains("trainer 0 and the other trainers are created when"));
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.pods(), ALL_PODS);
    assert!(conditions::holds(&cluster.status, ConditionType::Created));
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    // A trainer that is lost later is replaced whatever the servers do at that moment.
    cluster.edit("ps-0", |pod| ObservedPod { ready: false, ..pod });
    cluster.vanish("trainer-0");
    cluster.settle();
    assert_eq!(cluster.incarnation("trainer-0"), 1);
}

#[test]
fn pods_that_are_scheduled_together_are_created_together() {
    for policy in ["{backend: Volcano}", "{backend: Workload}", "{queue: team-a}"] {
        let mut cluster = Cluster::new(&format!("startupPolicy: ServersReady\nschedulingPolicy: {policy}"));
        cluster.reconcile();
        assert_eq!(cluster.pods(), ALL_PODS, "{policy}: waiting for the servers would be waiting for ever");
    }
}

#[test]
fn all_pods_start_again_after_a_failure_and_that_counts_once() {
    let mut cluster = running("failurePolicy: {restartStrategy: RecreateAll, maxRestarts: 2}");
    cluster.succeed("trainer-0");
    cluster.fail("ps-0", 1);
    cluster.fail("trainer-1", 1);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Restarting);
    assert_eq!(cluster.deleting(), ALL_PODS);
    assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (3, 1));
    cluster.settle();
    for who in ALL_PODS {
        assert_eq!(cluster.incarnation(who), 1, "{who}, also the one that was done");
    }
    assert_eq!((cluster.phase(), cluster.status.restarts), (Phase::Restarting, 3));
    assert_eq!(cluster.status.recreations_in_a_row, 1);
    assert_eq!(cluster.status.last_failure.as_ref().map(|cause| cause.pod.as_str()), Some("mnist-ps-0"));
    cluster.run_all();
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Running);
    assert!(!conditions::holds(&cluster.status, ConditionType::Restarting));

    // The second time in a row waits, and the third is one too many.
    cluster.fail("trainer-1", 1);
    cluster.reconcile();
    assert_eq!((cluster.deleting().len(), cluster.requeue), (0, Some(SignedDuration::from_secs(1))));
    assert!(cluster.message(ConditionType::Restarting).contains("all pods are started again at 20"));
    cluster.pass(1);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-0"), cluster.status.restarts_counted), (2, 2));
    assert_eq!(cluster.status.recreations_in_a_row, 2);
    cluster.run_all();
    cluster.settle();
    cluster.fail("trainer-1", 1);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.status.restarts_counted), (Phase::Failed, 2));
    assert_eq!(cluster.status.reason.as_deref(), Some("MaxRestartsExceeded"));
}

#[test]
fn a_rule_ends_the_job_or_restarts_it_or_looks_away() {
    let rules = "
failurePolicy:
  maxRestarts: 0
  rules:
    - {name: usage, action: FailJob, onExitCodes: [2]}
    - {name: flaky, action: Ignore, onExitCodes: [42]}
    - {name: together, action: RestartJob, countTowardsMax: false, onExitCodes: [43]}";
    let mut cluster = running(rules);
    cluster.fail("trainer-0", 42);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.status.restarts_counted, cluster.status.restarts), (Phase::Restarting, 0, 1));
    cluster.run_all();
    cluster.settle();
    cluster.fail("trainer-0", 43);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-0"), cluster.status.restarts_counted), (2, 0), "higher than all before");
    cluster.run_all();
    cluster.settle();
    cluster.fail("trainer-0", 2);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.status.reason.as_deref()), (Phase::Failed, Some("FailurePolicyRule")));
    let message = cluster.message(ConditionType::Failed);
    assert_eq!(
        message,
        "trainer 0 (pod mnist-trainer-0) ended with exit code 2, and rule usage of spec.failurePolicy says FailJob"
    );
}

#[test]
fn a_job_that_does_not_start_in_time_fails_with_what_it_waited_for() {
    let mut cluster = Cluster::new("runPolicy: {startupDeadlineSeconds: 40}");
    cluster.reconcile();
    let message = "Back-off pulling image \"psjobs-wroker:0.1.0\"".to_owned();
    let waiting_reason = WaitingReason { reason: "ImagePullBackOff".into(), message, unschedulable_since: None };
    cluster.edit("trainer-1", |pod| ObservedPod { waiting_reason: Some(waiting_reason), ..pod });
    cluster.pass(39);
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.requeue), (Phase::Pending, Some(SignedDuration::from_secs(1))));
    assert_eq!(cluster.status.reason.as_deref(), Some("ImagePullBackOff"));
    cluster.pass(1);
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.status.reason.as_deref()), (Phase::Failed, Some("StartupDeadlineExceeded")));
    let message = cluster.message(ConditionType::Failed);
    assert!(message.contains("trainer 1 cannot start: Back-off pulling image"), "{message}");

    // Once it has run, restarts take as long as they take.
    let mut cluster = running("runPolicy: {startupDeadlineSeconds: 40}");
    cluster.pass(10);
    cluster.vanish("trainer-0");
    cluster.settle();
    cluster.pass(100);
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Restarting);
}

#[test]
fn the_start_is_limited_also_if_the_first_status_came_after_the_creation() {
    let mut job = job("runPolicy: {startupDeadlineSeconds: 40}");
    job.metadata.creation_timestamp = Some(Time(at(0)));
    let mut cluster = Cluster::of(validate(job.into()).expect("valid"));
    cluster.pass(1);
    cluster.reconcile();
    cluster.pass(38);
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.requeue), (Phase::Pending, Some(SignedDuration::from_secs(1))));
    cluster.pass(1);
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.status.reason.as_deref()), (Phase::Failed, Some("StartupDeadlineExceeded")));
}

#[test]
fn long_pending_pods_free_what_the_others_hold_and_try_again() {
    let mut cluster = Cluster::new("schedulingPolicy: {scheduleTimeoutSeconds: 30}");
    cluster.reconcile();
    cluster.run_all();
    let message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.".to_owned();
    let unschedulable_since = Some(at(5));
    let waiting_reason = WaitingReason { reason: "Unschedulable".into(), message, unschedulable_since };
    cluster.edit("trainer-1", |pod| ObservedPod {
        phase: PodPhase::Pending,
        waiting_reason: Some(waiting_reason),
        ..pod
    });
    cluster.reconcile();
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(35)));
    cluster.pass(35);
    cluster.settle();
    assert_eq!((cluster.pods(), cluster.status.reason.as_deref()), (vec![], Some("ScheduleTimeout")));
    let message = cluster.message(ConditionType::Running);
    assert!(message.starts_with("trainer 1 found no node for 30 s, so all pods were deleted"), "{message}");
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(30)));
    cluster.pass(29);
    cluster.settle();
    assert_eq!(cluster.pods(), [""; 0]);
    cluster.pass(1);
    cluster.settle();
    assert_eq!(cluster.pods(), ALL_PODS);
    assert_eq!((cluster.incarnation("ps-0"), cluster.status.restarts_counted), (1, 0));
    cluster.run_all();
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Running);
}

/// Server 0 reports a step at this moment.
fn report(cluster: &mut Cluster, step: u64) {
    let at = Some(cluster.now);
    cluster.observed.progress = Some(ProgressReport { step, total_steps: 100, at, ..ProgressReport::default() });
    cluster.reconcile();
}

#[test]
fn certificates_are_renewed_before_they_end_from_a_checkpoint_else_when_a_pod_must_start_again() {
    const YEAR: i64 = 365 * 24 * 3600;
    const MONTH: i64 = 30 * 24 * 3600;
    let certificates = |cluster: &Cluster| cluster.status.certificates.clone();
    for (spec, due) in [("checkpoint: {existingClaim: c}", YEAR - MONTH), ("", YEAR)] {
        let mut cluster = running(spec);
        let first = certificates(&cluster);
        let expire = cluster.status.certificates_expire.clone().expect("reported");
        assert_eq!(expire.0, at(YEAR), "{spec}");
        assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(due)), "{spec}: looked at again then");
        cluster.pass(due - 1);
        cluster.settle();
        assert_eq!(certificates(&cluster), first, "{spec}: not before");

        cluster.pass(1);
        cluster.settle();
        if spec.is_empty() {
            assert_eq!(certificates(&cluster), first, "those who are connected go on");
            cluster.observed.pods.remove(&replica("trainer-1"));
            cluster.settle();
        }
        assert_ne!(certificates(&cluster), first, "{spec}");
        cluster.run_all();
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Running, "{spec}");
        assert_eq!(cluster.status.certificates_expire.as_ref().map(|end| end.0), Some(at(due + YEAR)), "{spec}");
        assert_eq!(cluster.status.restarts_counted, 0, "{spec}");
        assert!(cluster.events.iter().any(|event| event.contains("certificates end at")), "{:?}", cluster.events);
    }
    assert_eq!(running("network: {mutualTLS: false}").requeue, None, "nothing to renew");
}

#[test]
fn a_hung_job_is_stalled_then_started_again_then_failed() {
    let mut cluster = running("runPolicy: {progressDeadlineSeconds: 60}\nfailurePolicy: {maxRestarts: 1}");
    for (wait, step) in [(0, 7), (50, 8), (59, 8)] {
        cluster.pass(wait);
        report(&mut cluster, step);
        assert_eq!(cluster.phase(), Phase::Running, "step {step}");
    }
    cluster.pass(1);
    report(&mut cluster, 8);
    assert_eq!((cluster.phase(), cluster.requeue), (Phase::Stalled, Some(SignedDuration::ZERO)));
    assert!(conditions::holds(&cluster.status, ConditionType::Stalled));
    let message = cluster.message(ConditionType::Stalled);
    assert_eq!(
        message,
        "the job made no step for 60 s, as long as spec.runPolicy.progressDeadlineSeconds allows (step 8 of 100)"
    );
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.status.restarts_counted), (Phase::Restarting, 1));
    assert_eq!(cluster.status.last_failure.as_ref().map(|cause| cause.reason.as_str()), Some("Stalled"));
    cluster.settle();
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    assert!(!conditions::holds(&cluster.status, ConditionType::Stalled));
    report(&mut cluster, 1);
    cluster.pass(60);
    report(&mut cluster, 1);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.status.reason.as_deref()), (Phase::Failed, Some("MaxRestartsExceeded")));
}

#[test]
fn silence_of_server_0_and_a_new_step_are_no_stall() {
    let stepped = |cluster: &Cluster| {
        let progress = cluster.status.progress.clone().expect("reported");
        progress.last_step_time.expect("kept where a deadline needs it").0
    };
    let mut cluster = running("runPolicy: {progressDeadlineSeconds: 60}");
    report(&mut cluster, 7);
    let first = stepped(&cluster);
    cluster.pass(90);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running, "the report is old: it is not known what happens there");
    report(&mut cluster, 8);
    assert_eq!(cluster.phase(), Phase::Running);
    assert_eq!(stepped(&cluster).duration_since(first).as_secs(), 90);
    cluster.pass(60);
    report(&mut cluster, 8);
    assert_eq!(cluster.phase(), Phase::Stalled);
    assert_eq!(stepped(&cluster).duration_since(first).as_secs(), 90, "the same step is no other");
    report(&mut cluster, 9);
    assert_eq!(cluster.phase(), Phase::Running, "it went on by itself");
}

#[test]
fn a_dead_nodes_pod_is_deleted_by_force_when_the_policy_says_so() {
    let mut cluster = running("runPolicy: {forceDeleteAfterSeconds: 5}");
    cluster.edit("trainer-0", |pod| pod.deleted(30));
    cluster.pass(34);
    cluster.reconcile();
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(1)));
    cluster.pass(1);
    assert!(cluster.reconcile().delete[0].force);
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-0"), cluster.status.restarts_counted), (1, 0));
}

#[test]
fn a_healthy_while_makes_the_next_restart_immediate_again() {
    let mut cluster = running("failurePolicy: {maxRestarts: 9}");
    for wait in [0, 1, 2] {
        cluster.fail("trainer-0", 1);
        cluster.reconcile();
        // Not the certificates, a year later.
        let soon = cluster.requeue.filter(|wait| wait.as_hours() < 24);
        assert_eq!(soon, (wait > 0).then(|| SignedDuration::from_secs(wait)));
        cluster.pass(wait);
        cluster.settle();
        cluster.run_all();
        cluster.settle();
    }
    cluster.pass(1000);
    let now = cluster.now.duration_since(at(0)).as_secs();
    cluster.edit("trainer-0", |pod| {
        let pod = pod.failed(now, 1);
        let PodPhase::Failed(failure) = pod.phase else { unreachable!("it failed") };
        let started = Some(at(now - 600));
        ObservedPod { phase: PodPhase::Failed(crate::controller::observe::Failure { started, ..failure }), ..pod }
    });
    cluster.reconcile();
    assert_eq!(cluster.deleting(), ["trainer-0"]);
}

#[test]
fn a_pod_on_a_silent_node_is_replaced_after_a_while_without_counting() {
    // Seconds that the node is silent, whether the pod was being deleted since second 0 with 30 s of grace, and
    // whether it is replaced.
    let rows = [
        ("not for long", 29, false, false),
        ("as long as forceDeleteAfterSeconds says", 30, false, true),
        ("being deleted, not for long", 29, true, false),
        ("being deleted: its grace is not waited for", 30, true, true),
    ];
    for (label, silent, deleting, replaced) in rows {
        let mut cluster = running("failurePolicy: {maxRestarts: 0}");
        cluster.edit("trainer-0", |pod| {
            let pod = pod.on_lost_node(at(0));
            if deleting { pod.deleted(30) } else { pod }
        });
        cluster.reconcile();
        cluster.pass(silent);
        let decision = cluster.reconcile();
        let forced = decision.delete.iter().filter(|deletion| deletion.force).count();
        assert_eq!(forced, usize::from(replaced), "{label}");
        if !replaced {
            assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(1)), "{label}: it is looked at again");
            continue;
        }
        cluster.settle();
        cluster.run_all();
        cluster.reconcile();
        assert_eq!((cluster.phase(), cluster.incarnation("trainer-0")), (Phase::Running, 1), "{label}");
        assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (1, 0), "{label}");
    }
}

#[test]
fn a_lost_node_is_reported_and_rules_can_match_it() {
    let mut cluster = running("");
    cluster.edit("trainer-0", |pod| pod.on_lost_node(at(0)));
    cluster.pass(30);
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("NodeLost"));
    let message = cluster.message(ConditionType::Restarting);
    assert!(message.contains("trainer 0 was lost with n1, a node that has not answered since 2023-11-14"), "{message}");

    let rule = "failurePolicy: {rules: [{name: spot, action: RestartJob, onReasons: [NodeLost]}]}";
    let mut cluster = running(rule);
    cluster.edit("ps-0", |pod| pod.on_lost_node(at(0)));
    cluster.pass(30);
    cluster.reconcile();
    assert_eq!(
        cluster.deleting(),
        ["trainer-0", "trainer-1"],
        "the lost pod is gone at once, the others take their time"
    );
    assert_eq!(cluster.status.restarts_counted, 0);
}

#[test]
fn a_job_whose_copies_lie_on_one_node_says_so_once() {
    let once = "checkpoint: {volumeClaim: {size: 1Gi}}";
    let many = "checkpoint: {volumeClaim: {size: 1Gi, accessMode: ReadWriteMany}}";
    for (copies, claim, warned) in [(2, once, 1), (1, once, 0), (2, many, 0)] {
        let cluster = running(&format!("ps: {{replicas: 2, replicationFactor: {copies}}}\n{claim}"));
        let events = cluster.events.iter().filter(|event| event.starts_with("ServersShareNode: all servers")).count();
        assert_eq!(events, warned, "{copies} copies, {claim}");
    }
}
