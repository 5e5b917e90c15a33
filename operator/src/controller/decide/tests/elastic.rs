//! Jobs that grow and shrink: by being scaled, by losing trainers for good, and how they end.

use psjobs_api::crd::RestartStrategy;
use psjobs_policy::{Elastic, JobPolicy};

use super::*;
use crate::controller::observe::WaitingReason;

/// A running job of one server and `trainers` trainers that may become as few as `min`, and 8.
fn elastic(trainers: u32, min: u32, spec: &str) -> Cluster {
    let mut cluster = created(trainers, min, spec);
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    cluster
}

fn created(trainers: u32, min: u32, spec: &str) -> Cluster {
    let job = valid_job(spec);
    let policy = JobPolicy { elastic: Some(Elastic { min, max: 8 }), ..job.policy.clone() };
    let mut cluster = Cluster::of(ValidJob { trainers, policy, ..job });
    cluster.reconcile();
    cluster
}

/// `2/4`, and how many are given up.
fn trainers(cluster: &Cluster) -> (String, i32) {
    let trainer = cluster.status.trainer.clone().expect("counted");
    (trainer.summary, trainer.lost)
}

fn no_node(since: Timestamp) -> Option<WaitingReason> {
    let message = "0/1 nodes are available: 1 Insufficient cpu.".to_owned();
    Some(WaitingReason { reason: "Unschedulable".into(), message, unschedulable_since: Some(since) })
}

#[test]
fn a_scaled_job_grows_and_shrinks_without_a_restart() {
    let mut cluster = elastic(2, 1, "failurePolicy: {maxRestarts: 0}");
    cluster.scale(4);
    cluster.reconcile();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1", "trainer-2", "trainer-3"]);
    assert_eq!((cluster.phase(), trainers(&cluster)), (Phase::Running, ("2/4".into(), 0)));
    assert_eq!(
        cluster.message(ConditionType::Running),
        "all servers and 2 of 4 trainers run; waiting for trainer 2 to run"
    );
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.message(ConditionType::Running), "all servers and trainers run");
    assert_eq!(trainers(&cluster).0, "4/4");

    cluster.scale(1);
    let decision = cluster.reconcile();
    assert_eq!(cluster.deleting(), ["trainer-1", "trainer-2", "trainer-3"]);
    assert!(decision.delete.iter().all(|deletion| !deletion.force), "they have time to leave");
    assert_eq!((cluster.phase(), trainers(&cluster).0.as_str()), (Phase::Running, "1/1"));
    // What was asked to end ends with the exit code of the signal.
    cluster.edit("trainer-3", |pod| pod.failed_and_deleted(0));
    cluster.reconcile();
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0"]);

    cluster.scale(3);
    cluster.reconcile();
    cluster.run_all();
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-0"), cluster.incarnation("trainer-2")), (0, 1));
    assert_eq!((cluster.phase(), trainers(&cluster).0.as_str()), (Phase::Running, "3/3"));
    assert_eq!((cluster.status.restarts, cluster.status.restarts_counted), (0, 0));
    assert_eq!(
        (&cluster.status.last_failure, conditions::find(&cluster.status, ConditionType::Restarting)),
        (&None, None)
    );
    assert_eq!(
        cluster.events[2..],
        [
            "ScaledUp: Scaled from 2 to 4 trainers: trainers 2 and 3 join",
            "ScaledDown: Scaled from 4 to 1 trainers: trainers 1 to 3 leave, the others go on",
            "ScaledUp: Scaled from 1 to 3 trainers: trainers 1 and 2 join",
        ]
    );

    cluster.vanish("trainer-2");
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-2"), cluster.status.restarts), (2, 1), "a lost pod is replaced as ever");
}

#[test]
fn a_trainer_that_is_wanted_again_waits_for_its_old_pod_to_go() {
    let mut cluster = elastic(2, 1, "");
    cluster.scale(1);
    cluster.reconcile();
    cluster.scale(2);
    cluster.reconcile();
    assert_eq!((cluster.deleting(), cluster.incarnation("trainer-1")), (vec!["trainer-1".to_owned()], 0));
    assert_eq!((cluster.phase(), cluster.status.restarts), (Phase::Running, 0));
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-1"), cluster.status.restarts), (1, 0));
}

#[test]
fn an_incarnation_that_no_status_reports_is_not_used_twice() {
    let mut cluster = elastic(2, 1, "");
    // Created when the job was scaled up; the job was scaled down before the status was written.
    let late = pod(replica("trainer-2")).born(5, 0, 0);
    cluster.observed.pods.insert(replica("trainer-2"), late);
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"]);
    cluster.scale(3);
    cluster.settle();
    assert_eq!(cluster.incarnation("trainer-2"), 6);
}

#[test]
fn a_trainer_without_restarts_is_given_up_if_the_job_can_do_without_it() {
    const RULE: &str = "rules: [{name: usage, action: FailJob, onExitCodes: [1]}]";
    // Restarts, who fails, and who is given up; `None`: the job fails. Of 4 trainers 2 are needed.
    let rows: [(&str, &[&str], Option<i32>); 9] = [
        ("maxRestarts: 0", &["trainer-3"], Some(1)),
        ("maxRestarts: 0", &["trainer-1", "trainer-2"], Some(2)),
        ("maxRestarts: 0", &["trainer-1", "trainer-2", "trainer-3"], None),
        ("maxRestarts: 1", &["trainer-1", "trainer-2", "trainer-3"], Some(2)),
        ("maxRestarts: 0", &["trainer-0"], None),
        ("maxRestarts: 0", &["ps-0"], None),
        ("maxRestarts: 1", &["ps-0", "trainer-3"], Some(1)),
        ("maxRestarts: 0, restartStrategy: RecreateAll", &["trainer-3"], None),
        (RULE, &["trainer-3"], None),
    ];
    for (policy, failing, lost) in rows {
        let mut cluster = elastic(4, 2, &format!("failurePolicy: {{{policy}}}"));
        cluster.pass(10);
        failing.iter().for_each(|who| cluster.fail(who, 1));
        // The last failed first: that gives it no right to the only restart.
        cluster.edit(failing[failing.len() - 1], |pod| ObservedPod { phase: pod.clone().failed(5, 1).phase, ..pod });
        cluster.reconcile();
        let failed = cluster.phase() == Phase::Failed;
        assert_eq!((!failed).then(|| trainers(&cluster).1), lost, "{policy}: {failing:?}");
        assert!(cluster.status.last_failure.is_some(), "{policy}: {failing:?}");
        cluster.settle();
        if lost.is_some() {
            cluster.run_all();
            cluster.settle();
            assert_eq!(cluster.phase(), Phase::Running, "{policy}: {failing:?}");
        }
    }
}

#[test]
fn a_trainer_that_is_given_up_stays_away_until_the_job_is_scaled_or_changed() {
    let mut cluster = elastic(3, 1, "failurePolicy: {maxRestarts: 0}");
    cluster.fail("trainer-2", 3);
    cluster.settle();
    assert_eq!((cluster.pods().len(), trainers(&cluster)), (3, ("2/3".into(), 1)));
    let sentence = "trainer 2 ended with exit code 3, and spec.failurePolicy.maxRestarts is 0; it is given up until the \
                    job is scaled or changed, and 2 of 3 trainers go on (spec.elasticPolicy.minReplicas is 1)";
    assert_eq!(cluster.message(ConditionType::Shrunk), sentence);
    assert_eq!(cluster.events.last().map(String::as_str), Some(format!("Shrunk: {sentence}").as_str()));
    assert_eq!(cluster.message(ConditionType::Running), "all servers and trainers run");
    cluster.pass(1000);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.pods().len()), (Phase::Running, 3));
    // The next one is one too many, and it is the cause.
    let mut other = elastic(3, 2, "failurePolicy: {maxRestarts: 0}");
    other.fail("trainer-2", 3);
    other.settle();
    other.fail("trainer-1", 4);
    other.settle();
    assert_eq!(other.phase(), Phase::Failed);
    assert!(other.message(ConditionType::Failed).contains("trainer 1 (pod mnist-trainer-1) ended with exit code 4"));

    cluster.scale(3);
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-2"), trainers(&cluster).1, cluster.status.restarts), (1, 0, 0));
    assert!(!conditions::holds(&cluster.status, ConditionType::Shrunk));
}

#[test]
fn a_trainer_that_no_node_takes_is_given_up_if_all_that_are_needed_have_one() {
    // Who finds no node, and who is given up; `None`: the job stands back. Of 3 trainers 2 are needed.
    let rows: [(&[&str], Option<i32>); 4] = [
        (&["trainer-2"], Some(1)),
        (&["trainer-1", "trainer-2"], None),
        (&["trainer-0"], None),
        (&["ps-0", "trainer-2"], None),
    ];
    for (waiting, lost) in rows {
        let mut cluster = created(3, 2, "schedulingPolicy: {scheduleTimeoutSeconds: 30}");
        cluster.run_all();
        for who in waiting {
            cluster.edit(who, |pod| ObservedPod {
                phase: PodPhase::Pending,
                ready: false,
                waiting_reason: no_node(at(0)),
                ..pod
            });
        }
        cluster.pass(29);
        cluster.settle();
        assert_eq!((cluster.pods().len(), cluster.requeue), (4, Some(SignedDuration::from_secs(1))), "{waiting:?}");
        cluster.pass(1);
        cluster.settle();
        match lost {
            Some(_) => assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"], "{waiting:?}"),
            None => assert_eq!(cluster.pods(), [""; 0], "{waiting:?}"),
        }
        assert_eq!(trainers(&cluster).1, lost.unwrap_or(0), "{waiting:?}");
        assert_eq!(cluster.phase() == Phase::Running, lost.is_some(), "{waiting:?}");
    }
}

#[test]
fn an_elastic_job_runs_with_as_few_trainers_as_it_needs() {
    let mut cluster = created(3, 2, "runPolicy: {startupDeadlineSeconds: 40}");
    cluster.edit("ps-0", ObservedPod::running);
    cluster.edit("trainer-1", ObservedPod::running);
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Pending);
    cluster.edit("trainer-2", ObservedPod::running);
    cluster.edit("trainer-0", |pod| ObservedPod { waiting_reason: no_node(at(0)), ..pod });
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    assert_eq!(
        cluster.message(ConditionType::Running),
        "all servers and 2 of 3 trainers run; trainer 0 cannot start: 0/1 nodes are available: 1 Insufficient cpu."
    );
    assert_eq!(cluster.events.last().map(String::as_str), Some("Running: Running: 1 server and 2 of 3 trainers"));
    cluster.pass(100);
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Running, "it did start in time");
}

#[test]
fn once_a_trainer_has_ended_well_no_other_joins_and_the_job_ends_with_those_that_are_there() {
    let mut cluster = elastic(4, 1, "failurePolicy: {maxRestarts: 1}");
    cluster.succeed("trainer-1");
    cluster.reconcile();
    cluster.vanish("trainer-2");
    cluster.fail("trainer-3", 1);
    cluster.scale(5);
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"], "neither replaced nor new");
    assert_eq!((cluster.phase(), cluster.status.restarts_counted), (Phase::Running, 0));
    let note = "all work is dealt out, so that no trainer joins any more";
    assert!(cluster.events.iter().any(|event| event.ends_with(note)));
    assert!(cluster.events.iter().all(|event| !event.starts_with("PodLost")), "{:?}", cluster.events);
    // The first evaluates and reports.
    cluster.fail("trainer-0", 1);
    cluster.settle();
    assert_eq!((cluster.incarnation("trainer-0"), cluster.status.restarts_counted), (1, 1));
    cluster.run_all();
    cluster.succeed("trainer-0");
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.deleting()), (Phase::Completing, vec![]), "the servers end by themselves");
    cluster.succeed("ps-0");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Succeeded);
    assert_eq!(cluster.message(ConditionType::Succeeded), "2 trainers ended well");
}

#[test]
fn a_server_that_starts_again_while_the_job_closes_does_not_wait_for_trainers_that_have_ended() {
    let mut cluster = elastic(3, 3, "");
    assert!(!cluster.was_created_while_closing("ps-0"));
    cluster.succeed("trainer-1");
    cluster.vanish("trainer-2");
    cluster.fail("ps-0", 1);
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "trainer-0", "trainer-1"]);
    assert!(cluster.was_created_while_closing("ps-0"), "one trainer alone joins it");
}

#[test]
fn a_trainer_that_never_started_is_not_waited_for_nor_one_that_comes_after_the_servers_end() {
    let mut cluster = elastic(2, 1, "");
    cluster.scale(3);
    cluster.reconcile();
    cluster.succeed("trainer-0");
    cluster.succeed("trainer-1");
    cluster.reconcile();
    assert_eq!((cluster.phase(), cluster.deleting()), (Phase::Completing, vec!["trainer-2".to_owned()]));

    let mut cluster = elastic(2, 1, "");
    cluster.succeed("trainer-1");
    cluster.fail("trainer-0", 1);
    cluster.succeed("ps-0");
    cluster.settle();
    cluster.run_all();
    cluster.pass(29);
    cluster.settle();
    assert_eq!((cluster.phase(), cluster.incarnation("trainer-0")), (Phase::Running, 1));
    cluster.pass(1);
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Succeeded);
}

#[test]
fn success_policies_still_say_whose_success_is_enough() {
    // Trainers that end well while trainer 2 has failed for good, and whether that is enough.
    let rows: [(&str, &[&str], bool); 5] = [
        ("{}", &["trainer-1"], false),
        ("{}", &["trainer-0", "trainer-1"], true),
        ("{operator: RankZero}", &["trainer-1"], false),
        ("{operator: RankZero}", &["trainer-0"], true),
        ("{operator: Any}", &["trainer-1"], true),
    ];
    for (policy, done, enough) in rows {
        let mut cluster = elastic(3, 1, &format!("failurePolicy: {{maxRestarts: 0}}\nsuccessPolicy: {policy}"));
        cluster.fail("trainer-2", 1);
        cluster.settle();
        done.iter().for_each(|who| cluster.succeed(who));
        cluster.reconcile();
        assert_eq!(cluster.phase() == Phase::Completing, enough, "{policy} with {done:?}");
    }
}

#[test]
fn a_restart_of_all_and_a_suspension_bring_back_who_was_given_up() {
    let mut cluster = elastic(
        3,
        1,
        "failurePolicy: {maxRestarts: 0, rules: [{name: all, action: RestartJob, countTowardsMax: false, onExitCodes: [9]}]}",
    );
    assert_eq!(cluster.job.policy.failure_policy.restart_strategy, RestartStrategy::FailedPod);
    let lose = |cluster: &mut Cluster| {
        cluster.fail("trainer-2", 1);
        cluster.settle();
        assert_eq!(trainers(cluster).1, 1);
    };
    lose(&mut cluster);
    cluster.fail("trainer-0", 9);
    cluster.settle();
    assert_eq!((cluster.pods().len(), trainers(&cluster).1, cluster.incarnation("trainer-2")), (4, 0, 1));
    assert_eq!(cluster.status.restarts, 3, "those that were there");
    cluster.run_all();
    cluster.settle();
    lose(&mut cluster);
    cluster.suspend(true);
    cluster.settle();
    assert!(!conditions::holds(&cluster.status, ConditionType::Shrunk));
    cluster.suspend(false);
    cluster.settle();
    assert_eq!((cluster.pods().len(), trainers(&cluster).1, cluster.incarnation("trainer-2")), (4, 0, 2));
}
