//! Jobs with a server in the pod of each trainer.

use super::*;

const SPEC: &str = "ps: {placement: Colocated}";

#[test]
fn a_server_and_a_trainer_are_one_pod_and_two_replicas() {
    let mut cluster = Cluster::new(SPEC);
    let decision = decide(&cluster.job, &cluster.status, &cluster.observed, cluster.now);
    let pods = decision.create.iter().filter(|child| matches!(child, Child::Pod(_))).count();
    assert_eq!(pods, 2);
    cluster.reconcile();
    assert_eq!(cluster.pods(), ["ps-0", "ps-1", "trainer-0", "trainer-1"]);
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    let summary = |of_role: &Option<psjobs_api::crd::RoleStatus>| of_role.clone().expect("counted").summary;
    assert_eq!((summary(&cluster.status.ps), summary(&cluster.status.trainer)), ("2/2".into(), "2/2".into()));
}

#[test]
fn a_pod_in_which_one_program_failed_is_replaced_with_both() {
    for (who, code, restarts_counted) in [("trainer-1", 1, 1), ("ps-1", 1, 1), ("trainer-1", 75, 0)] {
        let mut cluster = running(SPEC);
        cluster.fail(who, code);
        let decision = cluster.reconcile();
        assert_eq!(decision.delete.len(), 1, "{who}: one pod");
        assert_eq!(cluster.deleting(), ["ps-1", "trainer-1"], "{who}");
        // The other one ends when Kubernetes asks it to, and waits in its pod until the first is gone.
        let other = if who == "ps-1" { "trainer-1" } else { "ps-1" };
        let second = cluster.now.duration_since(at(0)).as_secs();
        cluster.edit(other, |pod| if other == "ps-1" { pod.succeeded(second) } else { pod.failed_and_deleted(second) });
        cluster.pass(25);
        cluster.reconcile();
        assert_eq!(cluster.status.restarts_counted, restarts_counted, "{who}: what was asked to end has not failed");
        cluster.settle();
        assert_eq!((cluster.incarnation("ps-1"), cluster.incarnation("trainer-1")), (1, 1), "{who}");
        assert_eq!((cluster.incarnation("ps-0"), cluster.incarnation("trainer-0")), (0, 0), "{who}");
        assert_eq!(cluster.status.restarts_counted, restarts_counted, "{who}");
        let failures = |who| cluster.observed.pods[&replica(who)].failures;
        let want = |failed: &str| u32::from(failed == who) * restarts_counted.unsigned_abs();
        assert_eq!((failures("ps-1"), failures("trainer-1")), (want("ps-1"), want("trainer-1")), "{who}");
        cluster.run_all();
        cluster.reconcile();
        assert_eq!(cluster.phase(), Phase::Running, "{who}");
    }
}

#[test]
fn a_trainer_that_is_done_is_not_started_again_with_its_server() {
    let mut cluster = running(SPEC);
    cluster.succeed("trainer-0");
    cluster.settle();
    assert_eq!(cluster.pods().len(), 4, "its server goes on in the pod");
    assert_eq!(cluster.phase(), Phase::Running);
    cluster.vanish("ps-0");
    cluster.settle();
    assert_eq!(cluster.pods(), ["ps-0", "ps-1", "trainer-1"]);
    assert_eq!(cluster.finished_trainers("ps-0"), [0]);
    cluster.run_all();
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Running);
    cluster.succeed("trainer-1");
    cluster.reconcile();
    assert_eq!(cluster.phase(), Phase::Completing);
    cluster.succeed("ps-0");
    cluster.succeed("ps-1");
    cluster.settle();
    assert_eq!(cluster.phase(), Phase::Succeeded);
}

/// A trainer failed after all had left. Its server, and the others that have ended, are needed once more; that in the pod of a
/// trainer at work waits for that trainer.
#[test]
fn a_server_that_has_ended_is_not_replaced_under_a_trainer_at_work() {
    let mut object = job(SPEC);
    object.spec.trainer.replicas = 3;
    let mut cluster = Cluster::of(validate(object.into()).expect("valid"));
    cluster.reconcile();
    cluster.run_all();
    cluster.reconcile();
    cluster.succeed("trainer-0");
    for server in ["ps-0", "ps-1", "ps-2"] {
        cluster.edit(server, |pod| pod.concluded_with(0, r#"{"0": "0-2"}"#));
    }
    cluster.fail("trainer-2", 1);
    cluster.pass(30);
    cluster.settle();
    assert_eq!(cluster.incarnation("ps-0"), 1, "alone, as its trainer is done");
    assert_eq!((cluster.incarnation("ps-2"), cluster.incarnation("trainer-2")), (1, 1));
    assert_eq!((cluster.incarnation("ps-1"), cluster.incarnation("trainer-1")), (0, 0), "trainer 1 is at work");
    cluster.succeed("trainer-1");
    cluster.settle();
    assert_eq!(cluster.incarnation("ps-1"), 1);
    assert!(!cluster.pods().contains(&"trainer-1".to_owned()));
}

#[test]
fn a_lost_node_costs_a_server_and_a_trainer_and_counts_nothing() {
    let mut cluster = running(SPEC);
    let now = cluster.now;
    cluster.edit_pod("trainer-1", |pod| pod.on_lost_node(now));
    cluster.pass(60);
    let decision = cluster.reconcile();
    assert_eq!(decision.delete.iter().map(|deletion| deletion.force).collect::<Vec<_>>(), [true]);
    cluster.settle();
    assert_eq!((cluster.incarnation("ps-1"), cluster.incarnation("trainer-1")), (1, 1));
    assert_eq!(cluster.status.restarts_counted, 0);
}

#[test]
fn suspended_and_failed_jobs_delete_each_pod_once() {
    let mut cluster = running(SPEC);
    cluster.suspend(true);
    assert_eq!(cluster.reconcile().delete.len(), 2);
    let mut cluster = running("ps: {placement: Colocated}\nfailurePolicy: {maxRestarts: 0}");
    cluster.fail("trainer-0", 1);
    assert_eq!(cluster.reconcile().delete.len(), 2, "servers run in both");
    assert_eq!(cluster.phase(), Phase::Failed);
}
