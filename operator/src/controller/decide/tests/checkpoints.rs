//! The condition CheckpointFailing follows the reports of server 0.

use psjobs_api::FailedCheckpoint;

use super::*;
use crate::controller::model::CheckpointReport;

const DENIED: &str = "no checkpoint can be written: AccessDenied; check the credentials; training goes on";
const NO_BUCKET: &str = "the servers wait for the checkpoint folder: NoSuchBucket; create the bucket";

fn failure(message: &str, unix_seconds: Option<u64>) -> Option<FailedCheckpoint> {
    Some(FailedCheckpoint { message: message.into(), unix_seconds })
}

/// Server 0 reports at this moment.
fn report(cluster: &mut Cluster, failure: Option<FailedCheckpoint>) {
    cluster.observed.checkpoints = Some(CheckpointReport { failure, at: cluster.now });
    cluster.reconcile();
}

/// Events that the condition has begun.
fn begun(cluster: &Cluster) -> usize {
    cluster.events.iter().filter(|event| event.starts_with("CheckpointFailing: ")).count()
}

#[test]
fn a_fault_of_checkpoints_is_a_condition_with_one_event_until_one_is_written() {
    let mut cluster = running("checkpoint: {objectStore: {url: 's3://bucket/jobs'}}");
    let held = |cluster: &Cluster| conditions::find(&cluster.status, ConditionType::CheckpointFailing).cloned();
    report(&mut cluster, None);
    assert_eq!(held(&cluster), None, "a job whose checkpoints never failed does not have the condition");
    let since = Some(1_700_000_000);
    // The report, the condition's status and words, and the events so far.
    for (label, failure, status, words, events) in [
        ("a failure", failure(DENIED, since), "True", format!("{DENIED} (since 2023-11-14T22:13:20Z)"), 1),
        ("it lasts", failure(DENIED, since), "True", format!("{DENIED} (since 2023-11-14T22:13:20Z)"), 1),
        ("another cause", failure(NO_BUCKET, None), "True", NO_BUCKET.to_owned(), 1),
        ("it is over", None, "False", String::new(), 1),
        ("it begins again", failure(DENIED, None), "True", DENIED.to_owned(), 2),
    ] {
        cluster.pass(10);
        report(&mut cluster, failure);
        let condition = held(&cluster).expect(label);
        assert_eq!((condition.status.as_str(), &condition.message), (status, &words), "{label}");
        assert_eq!((begun(&cluster), cluster.phase()), (events, Phase::Running), "{label}");
    }
    report(&mut cluster, failure(&"x".repeat(100_000), None));
    assert!(cluster.message(ConditionType::CheckpointFailing).len() < 1000, "a pod may answer with any words");
}

#[test]
fn a_fault_of_checkpoints_ends_with_the_job_or_its_suspension() {
    type End = fn(&mut Cluster);
    let ends: [(Phase, End); 2] = [
        (Phase::Succeeded, |cluster| {
            ["trainer-0", "trainer-1", "ps-0"].into_iter().for_each(|pod| cluster.succeed(pod))
        }),
        (Phase::Suspended, |cluster| cluster.suspend(true)),
    ];
    for (phase, end) in ends {
        let mut cluster = running("");
        report(&mut cluster, failure(DENIED, None));
        assert!(conditions::holds(&cluster.status, ConditionType::CheckpointFailing));
        end(&mut cluster);
        cluster.settle();
        assert_eq!(cluster.phase(), phase);
        assert!(!conditions::holds(&cluster.status, ConditionType::CheckpointFailing), "{phase:?}");
    }
}

#[test]
fn a_report_from_before_a_job_was_resumed_says_nothing_of_it() {
    let (job, now) = (valid_job("checkpoint: {existingClaim: c}"), at(100));
    for (label, reported, want) in [("before it began", 89, false), ("after it", 90, true)] {
        let checkpoints = Some(CheckpointReport { failure: failure(DENIED, None), at: at(reported) });
        let observed = ObservedState { checkpoints, ..ObservedState::default() };
        let prev = ParameterServerJobStatus {
            phase: Some(Phase::Pending),
            start_time: Some(Time(at(90))),
            ..ParameterServerJobStatus::default()
        };
        let status = decide(&job, &prev, &observed, now).status;
        assert_eq!(conditions::holds(&status, ConditionType::CheckpointFailing), want, "{label}");
    }
}
