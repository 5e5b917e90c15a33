//! How a job ends, what it reports then, and what is left of it.

use super::*;

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
fn a_job_whose_server_0_still_writes_the_model_can_be_suspended_and_keeps_its_deadline() {
    let completing = || {
        let checkpoint = "checkpoint: {volumeClaim: {size: 1Gi}}";
        let mut cluster = running(&format!("{checkpoint}\nrunPolicy: {{activeDeadlineSeconds: 100}}"));
        cluster.succeed("trainer-0");
        cluster.succeed("trainer-1");
        cluster.pass(90);
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Completing);
        cluster
    };
    let mut late = completing();
    late.pass(10);
    late.reconcile();
    assert_eq!((late.phase(), late.status.reason.as_deref()), (Phase::Failed, Some("DeadlineExceeded")));

    let mut suspended = completing();
    suspended.suspend(true);
    suspended.settle();
    assert_eq!((suspended.phase(), suspended.pods().len()), (Phase::Suspended, 0));
    suspended.suspend(false);
    suspended.reconcile();
    assert_eq!(suspended.pods(), ["ps-0", "trainer-0", "trainer-1"], "they find their checkpoint");

    let mut ended = completing();
    ended.suspend(true);
    ended.succeed("ps-0");
    ended.reconcile();
    assert_eq!(ended.phase(), Phase::Succeeded, "nothing is left to do");
}

#[test]
fn a_job_whose_trainers_end_well_without_a_step_fails_when_its_servers_have_no_model_to_write() {
    // The step that server 0 reports, and the seconds since then.
    let rows = [(0, 10, Phase::Failed), (0, 40, Phase::Completing), (1, 10, Phase::Completing)];
    for (step, age, want) in rows {
        let mut cluster = running("checkpoint: {volumeClaim: {size: 1Gi}}\nrunPolicy: {serverDrainSeconds: 60}");
        cluster.succeed("trainer-0");
        cluster.succeed("trainer-1");
        cluster.reconcile();
        cluster.observed.progress = Some(ProgressReport { step, at: Some(at(60 - age)), ..ProgressReport::default() });
        cluster.pass(60);
        cluster.reconcile();
        assert_eq!(cluster.phase(), want, "step {step}, {age} s ago");
        assert_eq!(cluster.status.reason.as_deref() == Some("NeverTrained"), want == Phase::Failed);
    }
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
fn the_drain_begins_when_the_last_trainer_ended_but_clocks_of_nodes_are_not_trusted_far() {
    // When the trainers ended, and what is left of 60 s at second 100.
    for (ended, left) in [(100, 60), (99, 59), (93, 53), (40, 53), (130, 60)] {
        let mut cluster = running("");
        cluster.pass(100);
        for trainer in ["trainer-0", "trainer-1"] {
            cluster.edit(trainer, |pod| pod.succeeded(ended));
        }
        cluster.reconcile();
        assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(left)), "ended at {ended}");
    }
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
fn results_become_metrics_and_server_0_speaks_for_the_job() {
    let result = |steps, accuracy| ReplicaResult {
        steps,
        examples: steps * 32,
        seconds: 2.0,
        metrics: [("accuracy".to_owned(), accuracy), ("loss".to_owned(), f64::NAN)].into(),
        ..ReplicaResult::default()
    };
    let ends = |result: ReplicaResult| PodPhase::Succeeded { at: at(9), result: Some(result) };
    for (label, server, want) in [("with server 0", Some(result(25, 0.5)), 0.5), ("without", None, 0.9)] {
        let mut cluster = running("");
        cluster.edit("trainer-0", |pod| ObservedPod { phase: ends(result(10, 0.9)), ..pod });
        cluster.edit("trainer-1", |pod| ObservedPod { phase: ends(result(10, 0.1)), ..pod });
        cluster.edit("ps-0", |pod| ObservedPod {
            phase: PodPhase::Succeeded { at: at(9), result: server.clone() },
            ..pod
        });
        cluster.reconcile();
        let progress = cluster.status.progress.clone().expect(label);
        let metrics = progress.metrics.iter().map(|metric| (metric.name.as_str(), metric.value)).collect::<Vec<_>>();
        assert_eq!(metrics, [("accuracy", want)], "{label}: the lowest index counts, and no NaN");
        assert_eq!(progress.step, if server.is_some() { 25 } else { 20 }, "{label}");
        assert_eq!(progress.percent, 100, "{label}");
    }
}

#[test]
fn a_server_that_alone_answers_reports_for_the_job() {
    let result = |steps, accuracy| ReplicaResult {
        steps,
        metrics: [("accuracy".to_owned(), accuracy)].into(),
        left: [(0, "0-1".to_owned())].into(),
        ..ReplicaResult::default()
    };
    let ended = |pod: ObservedPod, result| {
        let phase = PodPhase::Succeeded { at: at(9), result: Some(result) };
        ObservedPod { phase, ready: false, alive: false, ..pod }
    };
    for (label, of_trainer, want) in [("alone", None, 0.98), ("beside a trainer", Some(result(20, 0.9)), 0.9)] {
        let mut cluster = running("ps: {replicas: 2}");
        cluster.observed.progress = Some(ProgressReport {
            step: 30,
            total_steps: 40,
            metrics: [("loss".to_owned(), 0.3), ("accuracy".to_owned(), 0.5)].into(),
            ..ProgressReport::default()
        });
        cluster.reconcile();
        let since = cluster.now;
        for pod in ["ps-0", "trainer-0", "trainer-1"] {
            cluster.edit(pod, |pod| pod.on_lost_node(since));
        }
        cluster.edit("ps-1", |pod| ended(pod, result(40, 0.98)));
        if let Some(of_trainer) = of_trainer {
            cluster.edit("trainer-0", |pod| ended(pod, of_trainer));
        }
        cluster.pass(60);
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{label}");
        let progress = cluster.status.progress.clone().expect(label);
        let metrics = progress.metrics.iter().map(|metric| (metric.name.as_str(), metric.value)).collect::<Vec<_>>();
        assert_eq!((metrics, progress.step), (vec![("accuracy", want), ("loss", 0.3)], 40), "{label}");
    }
}

#[test]
fn checkpoints_the_model_and_stragglers_are_reported_where_a_user_finds_them() {
    let written =
        |step: u64| CheckpointResult { step, path: format!("/checkpoints/step-{step}"), unix_seconds: 1_700_000_005 };
    let mut cluster = running("checkpoint: {volumeClaim: {size: 1Gi}, path: runs/7}");
    cluster.observed.progress = Some(ProgressReport {
        step: 40,
        total_steps: 100,
        checkpoint: Some(written(30)),
        stragglers: vec![1],
        ..ProgressReport::default()
    });
    cluster.reconcile();
    let checkpoint = cluster.status.last_checkpoint.clone().expect("reported");
    assert_eq!((checkpoint.step, checkpoint.path.as_str()), (30, "runs/7/step-30"));
    assert_eq!(checkpoint.time.map(|time| time.0), Some(at(5)));
    assert_eq!(cluster.status.progress.as_ref().expect("reported").stragglers, ["mnist-trainer-1"]);

    // A server that has just started knows of none; that takes nothing back.
    cluster.observed.progress = Some(ProgressReport { step: 41, total_steps: 100, ..ProgressReport::default() });
    cluster.reconcile();
    assert_eq!(cluster.status.last_checkpoint.as_ref().map(|newest| newest.step), Some(30));
    assert_eq!(cluster.status.progress.as_ref().expect("reported").stragglers, [""; 0]);

    let result = ReplicaResult {
        steps: 100,
        metrics: [("accuracy".to_owned(), 0.98), ("loss".to_owned(), 0.1)].into(),
        checkpoint: Some(written(100)),
        model: Some("/checkpoints/model.safetensors".into()),
        ..ReplicaResult::default()
    };
    cluster.edit("trainer-0", |pod| pod.succeeded(8));
    cluster.edit("trainer-1", |pod| pod.succeeded(8));
    cluster.edit("ps-0", |pod| ObservedPod {
        phase: PodPhase::Succeeded { at: at(9), result: Some(result.clone()) },
        ..pod
    });
    cluster.reconcile();
    let model = cluster.status.model.clone().expect("reported");
    assert_eq!(
        (model.path.as_str(), model.metric.map(|metric| metric.name).as_deref()),
        ("runs/7/model.safetensors", Some("accuracy"))
    );
    assert_eq!(cluster.status.last_checkpoint.as_ref().map(|newest| newest.step), Some(100));
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
        cluster.observed.service = false;
        cluster.pass(1000);
        cluster.settle();
        assert_eq!(cluster.pods(), [""; 0], "{label}");
        assert!(!cluster.observed.service, "{label}");
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
