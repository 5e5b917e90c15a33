//! The condition CheckpointFailing follows the reports of server 0.

use psjobs_api::FailedCheckpoint;

use super::*;
use crate::controller::model::CheckpointReport;

const DENIED: &str = "no checkpoint can be written: AccessDenied; check the credentials; training goes on";
const NO_BUCKET: &str = "the servers wait for the checkpoint folder: NoSuchBucket; create the bucket";

fn failure(message: &str, unix_seconds: Option<u64>) -> Option<FailedCheckpoint> {
    Some(FailedCheckpoint { message: message.into(), unix_seconds })
}

/// Server 0 reports at this moment, with the newest checkpoint written so many seconds ago, if there is one.
fn report(cluster: &mut Cluster, failure: Option<FailedCheckpoint>, age: Option<i64>) {
    let written = age.map(|age| cluster.now.as_second() - age);
    let newest = |at: i64| CheckpointResult { step: 7, path: "/checkpoints".into(), unix_seconds: at.unsigned_abs() };
    let progress = ProgressReport { checkpoint: written.map(newest), ..ProgressReport::default() };
    cluster.observed.progress = Some(progress);
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
    report(&mut cluster, None, Some(0));
    assert_eq!(held(&cluster), None, "a job whose checkpoints never failed does not have the condition");
    let since = Some(1_700_000_000);
    // The report, the age of the newest checkpoint, the condition's status and words, and the events so far.
    for (label, failure, age, status, words, events) in [
        ("a failure", failure(DENIED, since), Some(11), "True", format!("{DENIED} (since 2023-11-14T22:13:20Z)"), 1),
        ("it lasts", failure(DENIED, since), Some(21), "True", format!("{DENIED} (since 2023-11-14T22:13:20Z)"), 1),
        ("another cause", failure(NO_BUCKET, None), Some(31), "True", NO_BUCKET.to_owned(), 1),
        ("another process of server 0", None, Some(41), "True", NO_BUCKET.to_owned(), 1),
        ("it knows of no checkpoint", None, None, "True", NO_BUCKET.to_owned(), 1),
        ("one is written", None, Some(3), "False", String::new(), 1),
        ("nothing happens", None, Some(13), "False", String::new(), 1),
        ("it begins again", failure(DENIED, None), Some(23), "True", DENIED.to_owned(), 2),
    ] {
        cluster.pass(10);
        report(&mut cluster, failure, age);
        let condition = held(&cluster).expect(label);
        assert_eq!((condition.status.as_str(), &condition.message), (status, &words), "{label}");
        assert_eq!((begun(&cluster), cluster.phase()), (events, Phase::Running), "{label}");
    }
    report(&mut cluster, failure(&"x".repeat(100_000), None), None);
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
        report(&mut cluster, failure(DENIED, None), None);
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
