//! Behaviours, one test each, on a small cluster that does what it is told. The last file throws
//! random histories at it.

mod cluster;
mod history;
mod policies;

use psjobs_api::crd::{ConditionType, Phase};
use psjobs_api::{CheckpointResult, ReplicaResult};

use self::cluster::Cluster;
use super::*;
use crate::controller::fixtures::{at, job, pod, replica, valid_job};
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
    assert!(cluster.world.service);
    assert_eq!(cluster.phase(), Phase::Pending);
    assert!(conditions::holds(&cluster.status, ConditionType::Created));
    assert_eq!(cluster.told, ["Created: Created the service and the pods of 2 servers and 2 trainers"]);
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
        let world = World { pods, service: true, ..World::default() };
        let decision = decide(&valid_job(""), &ParameterServerJobStatus::default(), &world, at(6));
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

#[test]
fn what_keeps_a_pod_from_starting_is_told_in_its_words() {
    let mut cluster = Cluster::new("");
    cluster.reconcile();
    cluster.run_all();
    let obstacle = crate::controller::observe::Obstacle {
        reason: "Unschedulable".into(),
        message: "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.".into(),
        unschedulable_since: Some(at(0)),
    };
    cluster.edit("trainer-1", |pod| ObservedPod { life: Life::Pending, obstacle: Some(obstacle.clone()), ..pod });
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("Unschedulable"));
    let message = cluster.message(ConditionType::Running);
    assert_eq!(message, "trainer 1 cannot start: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
}

#[test]
fn the_last_trainer_ends_the_job_after_the_servers_ended() {
    let mut cluster = running("");
    cluster.succeed("trainer-0");
    cluster.succeed("trainer-1");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Completing);
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(60)), "the drain is bounded");
    cluster.pass(2);
    cluster.succeed("ps-0");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Succeeded);
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"], "finished pods stay for their logs");
    assert_eq!(cluster.status.progress.as_ref().map(|p| p.summary.as_str()), Some("100%"));
}

#[test]
fn servers_that_do_not_end_are_stopped_after_the_drain() {
    let mut cluster = running("runPolicy: {serverDrainSeconds: 20}");
    cluster.succeed("trainer-0");
    cluster.succeed("trainer-1");
    cluster.reconcile();
    cluster.pass(19);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Completing);
    cluster.pass(1);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Succeeded);
    assert_eq!(cluster.deleting(), ["ps-0"]);
    assert!(cluster.message(ConditionType::Succeeded).contains("serverDrainSeconds"));
}

#[test]
fn a_trainer_with_a_sidecar_is_done_when_its_main_container_is() {
    let mut cluster = running("");
    for trainer in ["trainer-0", "trainer-1"] {
        cluster.edit(trainer, |pod| ObservedPod { alive: true, ..pod.succeeded(1) });
    }
    cluster.succeed("ps-0");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Succeeded);
    assert_eq!(cluster.deleting(), ["trainer-0", "trainer-1"], "their sidecars are stopped");
}

#[test]
fn a_servers_early_end_waits_for_the_trainers_then_counts_as_failure() {
    let mut cluster = running("");
    cluster.succeed("ps-0");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running, "the trainers' end may be a moment away");
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(30)));
    cluster.pass(30);
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"]);
    assert_eq!(cluster.incarnation("ps-0"), 1);
    assert_eq!(cluster.status.restarts_counted, 1);
    let failure = cluster.status.last_failure.clone().expect("a cause");
    assert_eq!((failure.pod.as_str(), failure.reason.as_str()), ("mnist-ps-0", "EndedEarly"));
}

#[test]
fn results_become_metrics_and_server_0_speaks_for_the_job() {
    let result = |steps, accuracy| ReplicaResult {
        steps,
        examples: steps * 32,
        seconds: 2.0,
        metrics: [("accuracy".to_owned(), accuracy), ("loss".to_owned(), f64::NAN)].into(),
        ..ReplicaResult::default()
    };
    let ends = |result: ReplicaResult| Life::Succeeded { at: at(9), result: Some(result) };
    for (label, server, want) in [("with server 0", Some(result(25, 0.5)), 0.5), ("without", None, 0.9)] {
        let mut cluster = running("");
        cluster.edit("trainer-0", |pod| ObservedPod { life: ends(result(10, 0.9)), ..pod });
        cluster.edit("trainer-1", |pod| ObservedPod { life: ends(result(10, 0.1)), ..pod });
        cluster.edit("ps-0", |pod| ObservedPod { life: Life::Succeeded { at: at(9), result: server.clone() }, ..pod });
        cluster.reconcile();
        let progress = cluster.status.progress.clone().expect(label);
        let metrics = progress.metrics.iter().map(|metric| (metric.name.as_str(), metric.value)).collect::<Vec<_>>();
        assert_eq!(metrics, [("accuracy", want)], "{label}: the lowest index counts, and no NaN");
        assert_eq!(progress.step, if server.is_some() { 25 } else { 20 }, "{label}");
        assert_eq!(progress.percent, 100, "{label}");
    }
}

#[test]
fn checkpoints_the_model_and_stragglers_are_told_where_a_user_finds_them() {
    let told =
        |step: u64| CheckpointResult { step, path: format!("/checkpoints/step-{step}"), unix_seconds: 1_700_000_005 };
    let mut cluster = running("checkpoint: {volumeClaim: {size: 1Gi}, path: runs/7}");
    cluster.world.progress = Some(ProgressReport {
        step: 40,
        total_steps: 100,
        checkpoint: Some(told(30)),
        stragglers: vec![1],
        ..ProgressReport::default()
    });
    cluster.reconcile();
    let checkpoint = cluster.status.last_checkpoint.clone().expect("told");
    assert_eq!((checkpoint.step, checkpoint.path.as_str()), (30, "runs/7/step-30"));
    assert_eq!(checkpoint.time.map(|time| time.0), Some(at(5)));
    assert_eq!(cluster.status.progress.as_ref().expect("told").stragglers, ["mnist-trainer-1"]);

    // A server that has just started knows of none; that takes nothing back.
    cluster.world.progress = Some(ProgressReport { step: 41, total_steps: 100, ..ProgressReport::default() });
    cluster.reconcile();
    assert_eq!(cluster.status.last_checkpoint.as_ref().map(|newest| newest.step), Some(30));
    assert_eq!(cluster.status.progress.as_ref().expect("told").stragglers, [""; 0]);

    let result = ReplicaResult {
        steps: 100,
        metrics: [("accuracy".to_owned(), 0.98), ("loss".to_owned(), 0.1)].into(),
        checkpoint: Some(told(100)),
        model: Some("/checkpoints/model.safetensors".into()),
        ..ReplicaResult::default()
    };
    cluster.edit("trainer-0", |pod| pod.succeeded(8));
    cluster.edit("trainer-1", |pod| pod.succeeded(8));
    cluster
        .edit("ps-0", |pod| ObservedPod { life: Life::Succeeded { at: at(9), result: Some(result.clone()) }, ..pod });
    cluster.reconcile();
    let model = cluster.status.model.clone().expect("told");
    assert_eq!(
        (model.path.as_str(), model.metric.map(|metric| metric.name).as_deref()),
        ("runs/7/model.safetensors", Some("accuracy"))
    );
    assert_eq!(cluster.status.last_checkpoint.as_ref().map(|newest| newest.step), Some(100));
}

#[test]
fn progress_comes_from_server_0() {
    let mut cluster = running("training: {batch: {base: 10}}");
    cluster.world.progress = Some(ProgressReport {
        step: 420,
        total_steps: 1000,
        examples_per_second: 58.04,
        metrics: [("loss".to_owned(), 0.25)].into(),
        ..ProgressReport::default()
    });
    cluster.reconcile();
    let progress = cluster.status.progress.clone().expect("told");
    assert_eq!((progress.summary.as_str(), progress.step, progress.total_steps), ("42%", 420, 1000));
    assert_eq!(progress.examples_per_second, Some(58.0));
    assert_eq!(progress.estimated_remaining_seconds, Some(100));
}

#[test]
fn a_failed_trainer_comes_back_with_its_rank_and_the_next_incarnation() {
    let mut cluster = running("");
    cluster.fail("trainer-1", 1);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Restarting);
    assert_eq!(cluster.status.restarts_counted, 1, "on record before the pod is deleted");
    assert_eq!(cluster.deleting(), ["trainer-1"]);
    cluster.edit("trainer-1", |pod| pod.failed_and_deleted(0));
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("Error"), "our own delete is not the cause");
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-1"), cluster.incarnation("trainer-0")), (1, 0));
    assert_eq!(cluster.status.restarts, 1);
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    assert!(!conditions::holds(&cluster.status, ConditionType::Restarting));
    assert!(
        cluster
            .told
            .contains(&"PodFailed: trainer 1 ended with exit code 1; it is started again (restart 1 of 3)".into())
    );
}

#[test]
fn a_replica_that_keeps_failing_waits_longer_each_time_and_keeps_its_logs_meanwhile() {
    let mut cluster = running("failurePolicy: {maxRestarts: 9}");
    for (incarnation, wait) in [(0, 0), (1, 1), (2, 2), (3, 4), (4, 8)] {
        assert_eq!(cluster.incarnation("trainer-0"), incarnation);
        cluster.fail("trainer-0", 1);
        cluster.reconcile();
        assert_eq!(cluster.status.restarts_counted, incarnation as i32 + 1);
        if wait > 0 {
            assert_eq!(cluster.deleting(), [""; 0]);
            assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(wait)));
            cluster.pass(wait);
        }
        cluster.settle();
        cluster.run_all();
        cluster.settle();
    }
}

#[test]
fn the_job_fails_when_its_restarts_are_used_up() {
    let mut cluster = running("failurePolicy: {maxRestarts: 1}");
    cluster.fail("trainer-0", 1);
    cluster.settle();
    cluster.run_all();
    cluster.settle();
    cluster.fail("trainer-1", 3);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Failed);
    assert_eq!(cluster.status.reason.as_deref(), Some("MaxRestartsExceeded"));
    assert_eq!(
        cluster.message(ConditionType::Failed),
        "trainer 1 (pod mnist-trainer-1) ended with exit code 3; spec.failurePolicy.maxRestarts is 1, \
         so it is not started again"
    );
    assert_eq!(cluster.status.restarts_counted, 1, "the last failure was given no other start");
    assert_eq!(cluster.deleting(), ["ps-0", "trainer-0"], "the failed pod stays for its logs");
    let failure = cluster.status.last_failure.clone().expect("a cause");
    assert_eq!((failure.rank, failure.exit_code, failure.log_tail.as_str()), (2, Some(3), "Error: no such file"));
}

#[test]
fn restart_policies_judge_the_trainers_exit_code() {
    let rows = [
        ("OnFailure", 1, Phase::Restarting),
        ("OnFailure", 137, Phase::Restarting),
        ("Never", 1, Phase::Failed),
        ("Never", 137, Phase::Failed),
        ("ExitCode", 1, Phase::Failed),
        ("ExitCode", 127, Phase::Failed),
        ("ExitCode", 137, Phase::Restarting),
    ];
    for (policy, code, want) in rows {
        let mut object = job("");
        object.spec.trainer.restart_policy = serde_json::from_value(policy.into()).expect("a policy");
        let mut cluster = Cluster::of(validate(object.into()).expect("valid"));
        cluster.reconcile();
        cluster.run_all();
        cluster.reconcile();
        cluster.fail("trainer-0", code);
        cluster.reconcile();
        assert_eq!(cluster.phase(), want, "{policy} and exit code {code}");
    }
}

#[test]
fn servers_are_started_again_whatever_the_trainers_policy() {
    let mut object = job("");
    object.spec.trainer.restart_policy = psjobs_api::crd::RestartPolicy::Never;
    let mut cluster = Cluster::of(validate(object.into()).expect("valid"));
    cluster.reconcile();
    cluster.run_all();
    cluster.fail("ps-0", 137);
    cluster.settle();
    assert_eq!(cluster.incarnation("ps-0"), 1);
    assert_eq!(cluster.phase(), Phase::Restarting);
}

#[test]
fn disruptions_are_replaced_without_counting() {
    type Happen = fn(&mut Cluster);
    let rows: [(&str, Happen); 4] = [
        ("evicted", |cluster| cluster.edit("trainer-1", |pod| pod.disrupted(0))),
        ("deleted", |cluster| cluster.edit("trainer-1", |pod| pod.deleted(30))),
        ("deleted, and killed by that", |cluster| {
            cluster.edit("trainer-1", |pod| pod.failed_and_deleted(0));
        }),
        ("gone without a trace", |cluster| cluster.vanish("trainer-1")),
    ];
    for (label, happen) in rows {
        let mut cluster = running("failurePolicy: {maxRestarts: 0}");
        happen(&mut cluster);
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Restarting, "{label}");
        assert_eq!(cluster.incarnation("trainer-1"), 1, "{label}");
        assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (1, 0), "{label}");
        assert_eq!(cluster.status.last_failure, None, "{label}: nothing failed");
    }
}

#[test]
fn a_pod_whose_node_is_lost_is_deleted_by_force() {
    let mut cluster = running("");
    cluster.edit("trainer-0", |pod| pod.deleted(30));
    cluster.reconcile();
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(60)), "30 s of grace, 30 s of patience");
    cluster.pass(60);
    let decision = cluster.reconcile();
    assert_eq!(decision.delete.len(), 1);
    assert!(decision.delete[0].force);
    cluster.settle();
    assert_eq!(cluster.incarnation("trainer-0"), 1);
}

#[test]
fn the_first_failure_is_the_cause() {
    let mut cluster = running("");
    // The server died at second 3; the trainers followed and are seen earlier.
    cluster.edit("trainer-0", |pod| pod.failed(5, 1));
    cluster.reconcile();
    cluster.edit("ps-0", |pod| pod.failed(3, 137));
    cluster.edit("trainer-1", |pod| pod.failed(6, 1));
    cluster.reconcile();
    let cause = |cluster: &Cluster| cluster.status.last_failure.as_ref().map(|failure| failure.pod.clone());
    assert_eq!(cause(&cluster).as_deref(), Some("mnist-ps-0"));
    cluster.pass(10);
    cluster.settle();
    assert_eq!(cause(&cluster).as_deref(), Some("mnist-ps-0"), "until the job runs again");
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cause(&cluster).as_deref(), Some("mnist-ps-0"), "and after that, for whoever looks");
    cluster.edit("trainer-1", |pod| pod.failed(20, 1));
    cluster.reconcile();
    assert_eq!(cause(&cluster).as_deref(), Some("mnist-trainer-1"), "new trouble has a new cause");
}

#[test]
fn nothing_is_created_once_the_job_is_final() {
    for (label, finish) in [("succeeded", 0), ("failed", 1)] {
        let mut cluster = running("runPolicy: {cleanPodPolicy: All}\nfailurePolicy: {maxRestarts: 0}");
        if finish == 0 {
            ["trainer-0", "trainer-1", "ps-0"].iter().for_each(|pod| cluster.succeed(pod));
        } else {
            cluster.fail("trainer-0", 1);
        }
        cluster.settle();
        assert!(cluster.phase().is_final(), "{label}");
        assert_eq!(cluster.pods(), [""; 0], "{label}: cleanPodPolicy All");
        let end = cluster.status.clone();
        cluster.world.service = false;
        cluster.pass(1000);
        cluster.settle();
        assert_eq!(cluster.pods(), [""; 0], "{label}");
        assert!(!cluster.world.service, "{label}");
        assert_eq!((&cluster.status.conditions, &cluster.status.trainer), (&end.conditions, &end.trainer), "{label}");
    }
}

#[test]
fn pods_are_cleaned_up_as_the_policy_says() {
    // trainer-0 failed, trainer-1 and the server still run.
    let rows = [("Running", vec!["trainer-0"]), ("All", vec![]), ("None", vec!["trainer-0", "trainer-1"])];
    for (policy, left) in rows {
        let mut cluster =
            running(&format!("runPolicy: {{cleanPodPolicy: {policy}}}\nfailurePolicy: {{maxRestarts: 0}}"));
        cluster.fail("trainer-0", 1);
        let decision = cluster.reconcile();
        assert_eq!(decision.status.phase, Some(Phase::Failed), "{policy}: in the same decision, and written first");
        cluster.settle();
        assert_eq!(cluster.pods(), left, "{policy}: servers always stop");
    }
}

#[test]
fn the_job_is_deleted_exactly_when_its_time_is_over() {
    let mut cluster = running("runPolicy: {ttlSecondsAfterFinished: 100}");
    ["trainer-0", "trainer-1", "ps-0"].iter().for_each(|pod| cluster.succeed(pod));
    let decision = cluster.reconcile();
    assert_eq!(decision.requeue, Some(SignedDuration::from_secs(100)));
    cluster.pass(99);
    let decision = cluster.reconcile();
    assert_eq!((decision.delete_job, decision.requeue), (false, Some(SignedDuration::from_secs(1))));
    cluster.pass(1);
    assert!(cluster.reconcile().delete_job);
}

#[test]
fn a_job_that_is_active_for_too_long_fails() {
    let mut cluster = running("runPolicy: {activeDeadlineSeconds: 50}");
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(50)));
    cluster.pass(50);
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("DeadlineExceeded"));
    assert_eq!(cluster.deleting(), ["ps-0", "trainer-0", "trainer-1"]);
}

#[test]
fn a_suspended_job_has_no_pods_and_starts_anew_when_resumed() {
    let mut cluster = running("runPolicy: {activeDeadlineSeconds: 50}");
    cluster.succeed("trainer-0");
    cluster.fail("trainer-1", 1);
    cluster.settle();
    cluster.run_all();
    cluster.settle();
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
fn refused_creates_are_told_and_tried_again_until_they_work() {
    let mut cluster = Cluster::new("");
    cluster.refuse = Some("exceeded quota: pods".into());
    cluster.reconcile();
    assert_eq!(cluster.status.reason.as_deref(), Some("Refused"));
    let message = cluster.message(ConditionType::Created);
    assert!(message.contains("exceeded quota: pods") && message.contains("mnist"), "{message}");
    assert_eq!(cluster.told.len(), 1, "{:?}", cluster.told);
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(1)));
    cluster.pass(10);
    cluster.reconcile();
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(10)), "less and less often");
    assert_eq!(cluster.told.len(), 1, "told once");
    cluster.refuse = None;
    cluster.reconcile();
    assert!(conditions::holds(&cluster.status, ConditionType::Created));
    assert_eq!(cluster.incarnation("trainer-0"), 0, "a refused pod is no incarnation");
}

#[test]
fn a_deleted_service_comes_back() {
    let mut cluster = running("");
    cluster.world.service = false;
    cluster.reconcile();
    assert!(cluster.world.service);
    assert_eq!(cluster.status.restarts, 0);
}

#[test]
fn an_old_cache_makes_no_second_pod_and_counts_nothing() {
    let mut cluster = Cluster::new("");
    cluster.reconcile();
    cluster.run_all();
    let old = World::default();
    cluster.reconcile_on(old);
    assert_eq!((cluster.status.restarts, cluster.incarnation("trainer-0")), (0, 0));
    assert_eq!(cluster.phase(), Phase::Running);
}

#[test]
fn an_invalid_spec_is_told_once_and_its_pods_are_left_alone() {
    let error = validate(job("ps: {replicas: 0}").into()).expect_err("invalid");
    let first = refuse(&error, &ParameterServerJobStatus::default(), Some(1), at(0));
    assert_eq!(first.status.reason.as_deref(), Some("InvalidSpec"));
    assert_eq!(first.notices.len(), 1);
    let second = refuse(&error, &first.status, Some(1), at(5));
    assert_eq!((second.status, second.notices), (first.status, vec![]));
}
