//! Tests of pods that fail or are lost, and of when the job gives up.

use psjobs_api::exit_code::PEER_AWAY;

use super::*;
use crate::controller::observe::{Failure, WaitingReason};

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
fn a_trainer_that_is_lost_after_server_0_saw_it_leave_has_ended_well() {
    type Loss = fn(&mut Cluster);
    let losses: [(&str, Loss); 4] = [
        ("with its node", |cluster| {
            let since = cluster.now;
            cluster.edit("trainer-1", |pod| pod.on_lost_node(since));
        }),
        ("deleted", |cluster| cluster.vanish("trainer-1")),
        ("deleted, being stopped", |cluster| cluster.edit("trainer-1", |pod| pod.failed_and_deleted(300))),
        ("evicted", |cluster| cluster.edit("trainer-1", |pod| pod.disrupted(300))),
    ];
    for (label, lose) in losses {
        let mut cluster = running("failurePolicy: {maxRestarts: 0}");
        cluster.succeed("trainer-0");
        cluster.edit("ps-0", |pod| pod.concluded(0));
        cluster.pass(300);
        cluster.reconcile();
        assert_eq!(
            (cluster.phase(), cluster.deleting().len()),
            (Phase::Running, 0),
            "{label}: trainer 1 goes on by itself"
        );
        lose(&mut cluster);
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{label}");
        assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (0, 0), "{label}");
    }
}

#[test]
fn a_trainer_that_was_replaced_before_its_servers_end_was_seen_has_ended_well() {
    type Start = fn(ObservedPod) -> ObservedPod;
    let starts: [(&str, Start); 3] =
        [("pending", |pod| pod), ("running", ObservedPod::running), ("failed", |pod| pod.failed(9, 75))];
    for (label, start) in starts {
        let mut cluster = running("failurePolicy: {maxRestarts: 0}");
        cluster.succeed("trainer-0");
        cluster.vanish("trainer-1");
        cluster.reconcile();
        assert_eq!(cluster.incarnation("trainer-1"), 1, "{label}");
        cluster.edit("trainer-1", start);
        cluster.edit("ps-0", |pod| pod.concluded(0));
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{label}");
        assert_eq!((cluster.incarnation("ps-0"), cluster.status.restarts_counted), (0, 0), "{label}");
    }
}

#[test]
fn a_trainer_replaced_before_is_finished_when_its_pod_vanishes_after_it_left() {
    // The end of its first pod, and whether a decision's status was written after the second one had vanished.
    let rows = [("disruption", true), ("disruption", false), ("failure", true), ("failure", false)];
    for (first_end, status_was_written) in rows {
        let label = format!("{first_end}, status was written: {status_was_written}");
        let mut cluster = running("");
        cluster.succeed("trainer-0");
        let second = cluster.now.duration_since(at(0)).as_secs();
        cluster.edit("trainer-1", |pod| match first_end {
            "disruption" => pod.disrupted(second),
            _ => pod.failed(second, 1),
        });
        cluster.settle();
        cluster.run_all();
        cluster.reconcile();
        cluster.vanish("trainer-1");
        if status_was_written {
            cluster.reconcile();
        } else {
            cluster.reconcile_in_vain();
        }
        assert_eq!(cluster.incarnation("trainer-1"), 2, "{label}");
        cluster.run_all();
        cluster.edit("ps-0", |pod| pod.concluded_with(second, r#"{"0": "0", "1": "1"}"#));
        cluster.settle();
        cluster.pass(120);
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{label}");
        assert_eq!(cluster.incarnation("ps-0"), 0, "{label}");
    }
}

#[test]
fn a_trainer_that_failed_after_it_had_left_and_runs_again_gets_its_server_back() {
    let mut cluster = running("");
    cluster.succeed("trainer-0");
    cluster.fail("trainer-1", 1);
    cluster.settle();
    cluster.run_all();
    cluster.edit("ps-0", |pod| pod.concluded(0));
    cluster.reconcile();
    assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("trainer-1")), (0, 1));
    cluster.pass(30);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("trainer-1")), (1, 1));
    assert_eq!((cluster.finished_trainers("ps-0"), cluster.status.restarts_counted), (vec![0], 1));
}

#[test]
fn a_trainer_that_fails_after_server_0_saw_it_leave_gets_its_server_back_and_that_does_not_count() {
    // Long after the end of the servers, and so soon that they may yet be ending.
    for (before, after) in [(300, 0), (5, 30)] {
        let mut cluster = running("");
        cluster.succeed("trainer-0");
        cluster.edit("ps-0", |pod| pod.concluded(0));
        cluster.pass(before);
        cluster.fail("trainer-1", 1);
        cluster.settle();
        cluster.run_all();
        cluster.pass(after);
        cluster.settle();
        cluster.run_all();
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Running, "after {before} s");
        assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("trainer-1")), (1, 1), "after {before} s");
        assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (2, 1), "after {before} s");
    }
}

#[test]
fn a_trainer_that_finds_no_server_any_more_is_done_if_these_counted_it_as_finished() {
    for (label, concluded, want) in [
        ("the servers have ended", true, (Phase::Succeeded, 0, 0)),
        ("they are away", false, (Phase::Restarting, 1, 0)),
    ] {
        let mut cluster = running("ps: {replicas: 2}");
        cluster.succeed("trainer-0");
        if concluded {
            cluster.edit("ps-0", |pod| pod.concluded(0));
        }
        cluster.vanish("ps-1");
        cluster.pass(120);
        cluster.fail("trainer-1", PEER_AWAY);
        cluster.settle();
        let counted = cluster.status.restarts_counted;
        assert_eq!((cluster.phase(), cluster.incarnation("trainer-1"), counted), want, "{label}");
    }
}

#[test]
fn a_trainer_that_found_no_server_just_before_these_ended_is_done() {
    let mut cluster = running("");
    cluster.succeed("trainer-0");
    cluster.fail("trainer-1", PEER_AWAY);
    cluster.settle();
    cluster.edit("ps-0", |pod| pod.concluded(0));
    cluster.settle();
    assert_eq!(
        (cluster.phase(), cluster.incarnation("ps-0"), cluster.status.restarts_counted),
        (Phase::Succeeded, 0, 0)
    );
}

#[test]
fn a_server_that_starts_again_knows_the_trainers_that_have_finished() {
    let mut cluster = running("");
    assert_eq!(cluster.finished_trainers("ps-0"), [0; 0]);
    cluster.succeed("trainer-0");
    cluster.reconcile();
    // The pod of a trainer that has finished may be deleted: the status remembers it.
    cluster.vanish("trainer-0");
    cluster.fail("ps-0", 1);
    cluster.fail("trainer-1", 1);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("trainer-1")), (1, 1));
    assert_eq!((cluster.finished_trainers("ps-0"), cluster.finished_trainers("trainer-1")), (vec![0], vec![]));
}

#[test]
fn a_server_that_is_lost_after_another_saw_all_trainers_leave_is_not_missed() {
    for (ended, lost) in [("ps-0", "ps-1"), ("ps-1", "ps-0")] {
        let mut cluster = running("ps: {replicas: 2}");
        cluster.succeed("trainer-0");
        cluster.edit(ended, |pod| pod.concluded(0));
        let since = cluster.now;
        cluster.edit(lost, |pod| pod.on_lost_node(since));
        cluster.edit("trainer-1", |pod| pod.on_lost_node(since));
        cluster.pass(60);
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{lost} is lost");
        assert_eq!(cluster.status.restarts, 0, "{lost} is lost");
    }
}

#[test]
fn server_0_alone_comes_back_for_the_model_when_another_saw_all_trainers_leave() {
    let mut cluster = running(&format!("{CHECKPOINTS}ps: {{replicas: 2}}"));
    cluster.succeed("trainer-0");
    cluster.edit("ps-1", |pod| pod.concluded(0));
    let since = cluster.now;
    cluster.edit("ps-0", |pod| pod.on_lost_node(since));
    cluster.edit("trainer-1", |pod| pod.on_lost_node(since));
    cluster.pass(60);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("ps-1"), cluster.incarnation("trainer-1")), (1, 0, 0));
    assert_eq!(cluster.finished_trainers("ps-0"), [0, 1]);
    cluster.run_all();
    cluster.edit("ps-0", |pod| pod.concluded(90));
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Succeeded);
}

const CHECKPOINTS: &str = "checkpoint: {volumeClaim: {size: 1Gi}}\nrunPolicy: {serverDrainSeconds: 20}\n";

#[test]
fn a_server_0_that_is_lost_before_it_reported_the_model_comes_back_to_write_it() {
    type Loss = fn(&mut Cluster);
    let losses: [(&str, Loss); 4] = [
        ("with its node", |cluster| {
            let since = cluster.now;
            cluster.edit("ps-0", |pod| pod.on_lost_node(since));
        }),
        ("deleted", |cluster| cluster.vanish("ps-0")),
        ("evicted", |cluster| cluster.edit("ps-0", |pod| pod.disrupted(300))),
        ("being stopped", |cluster| cluster.edit("ps-0", |pod| pod.failed_and_deleted(300))),
    ];
    for (label, lose) in losses {
        let mut cluster = running(&format!("{CHECKPOINTS}failurePolicy: {{maxRestarts: 0}}"));
        cluster.succeed("trainer-0");
        cluster.succeed("trainer-1");
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Completing, "{label}");
        lose(&mut cluster);
        cluster.pass(400);
        cluster.settle();
        assert_eq!(cluster.incarnation("ps-0"), 1, "{label}");
        assert_eq!(cluster.finished_trainers("ps-0"), [0, 1], "{label}");
        cluster.run_all();
        cluster.pass(3600);
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Completing, "{label}: it has the time that it needs");
        assert!(cluster.message(ConditionType::Completing).contains("server 0 writes the model"), "{label}");
        cluster.edit("ps-0", |pod| pod.concluded(3700));
        cluster.settle();
        assert_eq!(cluster.phase(), Phase::Succeeded, "{label}");
        assert_eq!(cluster.status.restarts_counted, 0, "{label}");
    }
}

#[test]
fn a_job_whose_server_0_cannot_write_the_model_fails() {
    let mut cluster = running(&format!("{CHECKPOINTS}failurePolicy: {{maxRestarts: 1}}"));
    cluster.succeed("trainer-0");
    cluster.succeed("trainer-1");
    for _ in 0..2 {
        cluster.reconcile();
        cluster.fail("ps-0", 1);
        cluster.pass(600);
        cluster.settle();
        cluster.run_all();
    }
    assert_eq!(cluster.phase(), Phase::Failed);
    assert!(cluster.message(ConditionType::Failed).contains("ps-0"), "{}", cluster.message(ConditionType::Failed));
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
            .events
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
fn the_log_tail_in_the_status_has_at_most_2048_bytes_of_whole_characters() {
    let text = |bytes: usize| "x".repeat(bytes);
    let across = |character: char| format!("{}{character}{}", text(100), text(2047));
    let rows = [
        ("all that fits", text(2048), text(2048)),
        ("all lines that fit", format!("first\n{}", text(2042)), format!("first\n{}", text(2042))),
        ("a byte too many", text(2049), text(2048)),
        ("a line across the border", format!("first\n{}", text(2043)), text(2043)),
        ("a character of two bytes across the border", across('\u{fc}'), text(2047)),
        ("a character of three bytes across the border", across('\u{20ac}'), text(2047)),
        ("a character of four bytes across the border", across('\u{1f980}'), text(2047)),
    ];
    for (label, log, want) in rows {
        let mut cluster = running("");
        cluster.edit("trainer-0", |pod| {
            let pod = pod.failed(0, 1);
            let PodPhase::Failed(failure) = pod.phase else { unreachable!("it failed") };
            ObservedPod { phase: PodPhase::Failed(Failure { log_tail: log, ..failure }), ..pod }
        });
        cluster.reconcile();
        let failure = cluster.status.last_failure.clone().expect(label);
        assert_eq!(failure.log_tail, want, "{label}");
    }
}

#[test]
fn incarnations_grow_although_somebody_writes_the_highest_number_into_a_pod() {
    let mut cluster = running("");
    let overwrite = |cluster: &mut Cluster| {
        cluster.edit("trainer-1", |pod| ObservedPod { incarnation: u32::MAX, ..pod });
        cluster.settle();
    };
    for _ in 0..3 {
        overwrite(&mut cluster);
        cluster.edit("trainer-1", |pod| pod.deleted(30));
        cluster.settle();
        cluster.run_all();
    }
    overwrite(&mut cluster);
    cluster.suspend(true);
    cluster.reconcile();
    cluster.suspend(false);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Pending, "a pod from before the job was suspended does not count");
    cluster.settle();
    let of_trainer = cluster.history.iter().filter(|(of, _)| *of == replica("trainer-1"));
    let incarnations = of_trainer.map(|&(_, incarnation)| incarnation).collect::<Vec<_>>();
    assert_eq!(incarnations.len(), 5, "{incarnations:?}");
    assert!(incarnations.is_sorted_by(|earlier, later| earlier < later), "{incarnations:?}");
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
    assert_eq!(cluster.requeue, Some(SignedDuration::from_secs(60)), "30 s of grace, and 30 s more");
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
fn a_job_whose_server_finds_no_node_for_an_hour_waits_and_counts_nothing() {
    let mut cluster = Cluster::new("training: {consistency: {mode: Sync}}\nfailurePolicy: {maxRestarts: 0}");
    cluster.scale(4);
    cluster.reconcile();
    cluster.run_all();
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.pods().len()), (Phase::Running, 5));
    cluster.vanish("ps-0");
    cluster.settle();
    let unschedulable_since = Some(cluster.now);
    let waiting_reason = WaitingReason {
        reason: "Unschedulable".into(),
        message: "0/3 nodes are available".into(),
        unschedulable_since,
    };
    cluster.edit("ps-0", |pod| ObservedPod { waiting_reason: Some(waiting_reason), ..pod });
    for minute in 0..60 {
        // The default is to wait; these have a limit in their template, and end again and again.
        let trainers = cluster.pods().into_iter().filter(|pod| pod.starts_with("trainer")).collect::<Vec<_>>();
        for trainer in &trainers {
            cluster.edit(trainer, |pod| if pod.phase == PodPhase::Pending { pod.running() } else { pod });
        }
        for trainer in trainers.iter().skip(minute % 4) {
            cluster.fail(trainer, 75);
        }
        cluster.settle();
        cluster.pass(60);
        cluster.settle();
        assert!(!cluster.phase().is_final(), "after {minute} min: {}", cluster.message(ConditionType::Failed));
        assert_eq!(cluster.status.restarts_counted, 0, "after {minute} min");
    }
    assert_eq!(cluster.status.last_failure, None, "no pod is to blame");
    assert!(cluster.incarnation("trainer-0") > 10, "they were started again");
    cluster.run_all();
    cluster.pass(60);
    cluster.settle();
    cluster.run_all();
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Running);
    cluster.fail("trainer-0", 1);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Failed, "an error of its own counts");
}
