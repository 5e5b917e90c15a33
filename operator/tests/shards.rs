//! Several operators share the jobs of one API server by the label psjobs.dev/shard.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::BTreeSet;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt as _;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use serde_json::json;
use support::{Operator, Team};

/// An operator of a shard under the name of it, or of no shard under the name `unnamed`.
fn operator(team: &Team, shard: &str) -> Operator {
    let common = ["--leader-elect", "--lease-namespace", &team.namespace, "--identity", shard];
    let of_shard = ["--shard", shard];
    let of_shard = if shard == "unnamed" { &[] } else { &of_shard[..] };
    team.operator_with(&[&common, of_shard].concat())
}

/// Labels a job as `kubectl label psjob NAME psjobs.dev/shard=SHARD` does, or takes the label away.
async fn move_to(team: &Team, job: &str, shard: Option<&str>) {
    let patch = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_SHARD: shard}}}));
    let jobs = team.api::<ParameterServerJob>();
    jobs.patch(job, &PatchParams::default(), &patch).await.expect("the job can be labelled");
}

/// Applies a job like `mnist` under another name.
async fn apply_like(team: &Team, mnist: &ParameterServerJob, name: &str, shard: Option<&str>) {
    let labels = shard.map(|shard| [(names::LABEL_SHARD.to_owned(), shard.to_owned())].into());
    let metadata = kube::core::ObjectMeta { name: Some(name.into()), labels, ..Default::default() };
    let job = ParameterServerJob { metadata, spec: mnist.spec.clone(), status: None };
    team.api().create(&PostParams::default(), &job).await.expect("the job is accepted");
}

/// Returns the reporters of a job's events.
async fn tellers(team: &Team, job: &str) -> BTreeSet<String> {
    let of_job = ListParams::default().fields(&format!("involvedObject.name={job}"));
    let events = team.api::<Event>().list(&of_job).await.expect("events can be listed");
    events.into_iter().filter_map(|event| event.reporting_instance).collect()
}

async fn uids(team: &Team) -> Vec<(String, Option<String>)> {
    let pods = team.api::<Pod>().list(&ListParams::default()).await.expect("pods can be listed");
    pods.iter().map(|pod| (pod.name_any(), pod.uid())).collect()
}

async fn until_job(team: &Team, job: &str, phase: Phase) {
    let is = |job: Option<&ParameterServerJob>| {
        job.is_some_and(|job| job.status.as_ref().is_some_and(|s| s.phase == Some(phase)))
    };
    team.until(job, is).await;
}

#[tokio::test]
async fn each_job_is_reconciled_by_its_shards_operator_and_by_no_other() {
    let Some(team) = Team::new("shards").await else { return };
    // Jobs first: an operator that took care of more than its own would do so from its start.
    let unnamed_job = team.apply("failurePolicy: {maxRestarts: 0}").await;
    apply_like(&team, &unnamed_job, "one", Some("a")).await;
    apply_like(&team, &unnamed_job, "two", Some("b")).await;
    let (a, _b, _unnamed) = (operator(&team, "a"), operator(&team, "b"), operator(&team, "unnamed"));
    let jobs = ["mnist", "one", "two"];
    for (job, shard) in jobs.into_iter().zip([None, Some("a"), Some("b")]) {
        for pod in ["ps-0", "trainer-0", "trainer-1"].map(|pod| format!("{job}-{pod}")) {
            team.run(&pod).await;
            let pod = team.pod(&pod, 0).await;
            assert_eq!(pod.labels().get(names::LABEL_SHARD).map(String::as_str), shard, "{}", pod.name_any());
        }
        until_job(&team, job, Phase::Running).await;
    }
    for (lease, holder) in [("psjobs-operator", "unnamed"), ("psjobs-operator-a", "a"), ("psjobs-operator-b", "b")] {
        let lease = team.api::<Lease>().get(lease).await.expect("a lease of its own");
        assert_eq!(lease.spec.and_then(|spec| spec.holder_identity).as_deref(), Some(holder));
    }

    // One is killed: its job waits, the others' jobs go on to their end.
    drop(a);
    team.delete_pod("one-trainer-0").await;
    for job in ["mnist", "two"] {
        for pod in ["trainer-0", "trainer-1", "ps-0"] {
            team.end(&format!("{job}-{pod}"), 0, "").await;
        }
        until_job(&team, job, Phase::Succeeded).await;
    }
    assert!(!team.pods().await.contains(&"one-trainer-0".to_owned()), "no other operator replaces a pod of its job");
    let _a = operator(&team, "a");
    team.pod("one-trainer-0", 1).await;
    for (job, shard) in jobs.into_iter().zip(["unnamed", "a", "b"]) {
        assert_eq!(tellers(&team, job).await, [shard.to_owned()].into(), "{job}");
    }
}

#[tokio::test]
async fn a_job_whose_shard_changes_is_handed_over_with_its_pods() {
    let Some(team) = Team::new("handover").await else { return };
    let (a, _b, _unnamed) = (operator(&team, "a"), operator(&team, "b"), operator(&team, "unnamed"));
    // The strictest strategy: one pod that seems lost would start all of them again.
    let job = team.apply("failurePolicy: {restartStrategy: RecreateAll, maxRestarts: 0}").await;
    team.run_all().await;
    let from_the_start = uids(&team).await;
    assert_eq!((from_the_start.len(), job.metadata.labels), (3, None));

    for shard in [Some("a"), Some("b"), None, Some("a")] {
        move_to(&team, "mnist", shard).await;
        let status = team.status(|status| status.shard.as_deref() == shard).await;
        assert_eq!((status.phase, status.restarts), (Some(Phase::Running), 0), "{shard:?}");
        assert_eq!(uids(&team).await, from_the_start, "{shard:?}");
    }
    // From one that is dead, and to one that finds out about a lost pod only by itself.
    drop(a);
    move_to(&team, "mnist", Some("b")).await;
    team.status(|status| status.shard.as_deref() == Some("b")).await;
    assert_eq!(uids(&team).await, from_the_start);
    team.end("mnist-trainer-0", 0, "").await;
    team.end("mnist-trainer-1", 0, "").await;
    team.phase(Phase::Completing).await;
    team.end("mnist-ps-0", 0, "").await;
    let done = team.phase(Phase::Succeeded).await;
    assert_eq!((done.restarts, uids(&team).await), (0, from_the_start));
}
