//! The operator against a real API server, with pods played by the test. Each story has a namespace.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::BTreeSet;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Pod, ResourceQuota, Secret, Service};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use psjobs_api::crd::{ConditionType, ParameterServerJob, ParameterServerJobStatus, Phase};
use psjobs_operator::controller::ReconcileError;
use psjobs_operator::controller::write::update_status::update_status;
use serde_json::json;
use support::{ApiServer, Team, install_definition, install_pod_groups};

/// The rest of a test needs an API server; without one it says so and ends.
macro_rules! team {
    ($name:literal) => {
        match Team::new($name).await {
            Some(team) => team,
            None => return,
        }
    };
}

const PODS: [&str; 3] = ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"];

fn message(status: &ParameterServerJobStatus, type_: ConditionType) -> String {
    let condition = status.conditions.iter().find(|condition| condition.type_ == type_);
    condition.map(|condition| condition.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_job_runs_from_apply_to_succeeded() {
    let team = team!("happy");
    let _operator = team.operator();
    let job = team.apply("").await;
    team.status(|status| status.conditions.iter().any(|c| c.type_ == ConditionType::Created && c.status == "True"))
        .await;
    assert_eq!(team.pods().await, PODS);
    let service = team.until("mnist", |service: Option<&Service>| service.is_some()).await.expect("it exists");
    assert_eq!(service.owner_references()[0].uid, job.uid().expect("stored"));

    let running = team.run_all().await;
    assert_eq!(running.ps.map(|ps| ps.summary).as_deref(), Some("1/1"));
    let result = r#"{"steps":40,"examples":1280,"seconds":4.0,"metrics":{"accuracy":0.981}}"#;
    team.end("mnist-trainer-0", 0, result).await;
    team.end("mnist-trainer-1", 0, result).await;
    team.phase(Phase::Completing).await;
    team.end("mnist-ps-0", 0, "").await;
    let done = team.phase(Phase::Succeeded).await;
    let (start, end) = (done.start_time.expect("reported"), done.completion_time.expect("reported"));
    assert!(start.0 <= end.0, "from {start:?} to {end:?}");
    let progress = done.progress.expect("reported");
    assert_eq!((progress.summary.as_str(), progress.metrics[0].name.as_str()), ("100%", "accuracy"));
    assert_eq!(progress.metrics[0].value, 0.981);
    assert_eq!((done.restarts, done.last_failure), (0, None));
    assert_eq!(team.pods().await, PODS, "finished pods stay for their logs");
    for reason in ["Created", "Running", "Completing", "Succeeded"] {
        assert!(!team.event(reason).await.is_empty(), "{reason}");
    }
}

#[tokio::test]
async fn a_failure_ends_the_job_with_its_cause_and_nothing_comes_after() {
    let team = team!("failure");
    let _operator = team.operator();
    team.apply("failurePolicy: {maxRestarts: 1}").await;
    team.run_all().await;
    team.end("mnist-trainer-1", 3, "step 7\nError: no such file").await;
    team.pod("mnist-trainer-1", 1).await;
    team.run_all().await;
    team.end("mnist-trainer-1", 3, "step 9\nError: no such file").await;
    let failed = team.phase(Phase::Failed).await;
    let cause = failed.last_failure.expect("a cause");
    assert_eq!((cause.pod.as_str(), cause.rank, cause.exit_code), ("mnist-trainer-1", 2, Some(3)));
    assert_eq!(cause.log_tail, "step 9\nError: no such file");
    assert!(team.event("Failed").await.contains("exit code 3"));
    for pod in ["mnist-ps-0", "mnist-trainer-0"] {
        team.until(pod, |pod: Option<&Pod>| pod.is_none()).await;
    }

    // The end is final: a change to the job or its children makes nothing new.
    team.delete_service("mnist").await;
    team.delete_pod("mnist-trainer-1").await;
    team.patch(json!({"runPolicy": {"ttlSecondsAfterFinished": 2}})).await;
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
    assert_eq!(team.pods().await, [""; 0]);
}

#[tokio::test]
async fn a_deleted_pod_is_replaced_with_a_higher_incarnation_even_while_no_operator_runs() {
    let team = team!("replaced");
    let operator = team.operator();
    team.apply("failurePolicy: {maxRestarts: 0}").await;
    team.run_all().await;
    team.delete_pod("mnist-trainer-0").await;
    let pod = team.pod("mnist-trainer-0", 1).await;
    let env = pod.spec.expect("a spec").containers[0].env.clone().expect("an environment");
    let incarnation = env.iter().find(|var| var.name == "PSJOB_INCARNATION").and_then(|var| var.value.as_deref());
    assert_eq!(incarnation, Some("1"));
    team.run_all().await;

    drop(operator);
    team.delete_pod("mnist-trainer-0").await;
    let _operator = team.operator();
    team.pod("mnist-trainer-0", 2).await;
    let status = team.run_all_again(2).await;
    assert_eq!(status.restarts_counted, 0);
}

#[tokio::test]
async fn a_full_quota_is_reported_and_the_job_recovers() {
    let team = team!("quota");
    // The test plays the quota controller too.
    let hard = |pods: &str| json!({"spec": {"hard": {"pods": pods}}});
    let quota = serde_json::from_value(json!({"metadata": {"name": "few"}})).expect("a quota");
    let quotas = team.api::<ResourceQuota>();
    quotas.create(&PostParams::default(), &quota).await.expect("a quota can be made");
    let set = async |limit: &str, used: &str| {
        let params = PatchParams::default();
        quotas.patch("few", &params, &Patch::Merge(hard(limit))).await.expect("the quota changes");
        let status = json!({"status": {"hard": {"pods": limit}, "used": {"pods": used}}});
        quotas.patch_status("few", &params, &Patch::Merge(status)).await.expect("the quota's use changes");
    };
    set("0", "0").await;
    team.until_pods_are_refused("exceeded quota: few").await;

    let _operator = team.operator();
    team.apply("").await;
    let refused = team.status(|status| status.reason.as_deref() == Some("Refused")).await;
    let words = message(&refused, ConditionType::Created);
    assert!(words.contains("exceeded quota: few") && words.contains("mnist-ps-0"), "{words}");
    assert!(team.event("Refused").await.contains("exceeded quota"));
    set("10", "0").await;
    let status = team.run_all().await;
    assert_eq!(status.restarts, 0);
}

#[tokio::test]
async fn a_service_of_somebody_else_is_named_and_left_alone() {
    let team = team!("foreign");
    let theirs = json!({"metadata": {"name": "mnist"}, "spec": {"ports": [{"port": 80}]}});
    let theirs = serde_json::from_value(theirs).expect("a service");
    team.api::<Service>().create(&PostParams::default(), &theirs).await.expect("a service can be made");
    let _operator = team.operator();
    team.apply("").await;
    let refused = team.status(|status| status.reason.as_deref() == Some("Refused")).await;
    let words = message(&refused, ConditionType::Created);
    assert!(words.contains("another service mnist that does not belong to this job"), "{words}");
    team.delete_service("mnist").await;
    team.run_all().await;
    let ours = team.api::<Service>().get("mnist").await.expect("made by now");
    assert_eq!(ours.owner_references().len(), 1);
}

#[tokio::test]
async fn a_job_is_deleted_after_its_time() {
    let team = team!("ttl");
    let _operator = team.operator();
    team.apply("runPolicy: {ttlSecondsAfterFinished: 1}").await;
    team.run_all().await;
    for pod in PODS {
        team.end(pod, 0, "").await;
    }
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
}

#[tokio::test]
async fn a_suspended_job_has_no_pods_and_can_be_changed_and_resumed() {
    let team = team!("suspend");
    let _operator = team.operator();
    team.apply("").await;
    team.run_all().await;
    team.patch(json!({"suspend": true})).await;
    team.phase(Phase::Suspended).await;
    for pod in PODS {
        team.until(pod, |pod: Option<&Pod>| pod.is_none()).await;
    }
    team.patch(json!({"trainer": {"replicas": 3}})).await;
    team.patch(json!({"suspend": false})).await;
    team.pod("mnist-trainer-2", 1).await;
    team.run("mnist-trainer-2").await;
    let status = team.run_all().await;
    assert_eq!((status.restarts, status.trainer.map(|trainer| trainer.desired)), (0, Some(3)));
}

#[tokio::test]
async fn an_elastic_job_grows_shrinks_gives_up_a_trainer_and_ends() {
    let team = team!("elastic");
    let operator = team.operator();
    team.apply("elasticPolicy: {minReplicas: 1, maxReplicas: 4}\nfailurePolicy: {maxRestarts: 0}").await;
    team.run_all().await;
    let uids = async |pods: &[&str]| {
        let mut uids = Vec::new();
        for pod in pods {
            uids.push(team.api::<Pod>().get(pod).await.expect("it exists").uid());
        }
        uids
    };
    let from_the_start = uids(&PODS).await;
    let trainers = |summary: &'static str| {
        move |status: &ParameterServerJobStatus| status.trainer.as_ref().is_some_and(|t| t.summary == summary)
    };

    team.scale(4).await;
    for pod in ["mnist-trainer-2", "mnist-trainer-3"] {
        team.run(pod).await;
    }
    let status = team.status(trainers("4/4")).await;
    assert_eq!((status.phase, status.restarts), (Some(Phase::Running), 0));
    assert!(team.event("ScaledUp").await.contains("trainers 2 and 3 join"));
    // What an autoscaler reads.
    let scale = team.api::<ParameterServerJob>().get_scale("mnist").await.expect("it can be scaled");
    let scale = scale.status.expect("reported");
    assert_eq!(
        (scale.replicas, scale.selector.as_deref()),
        (4, Some("psjobs.dev/job-name=mnist,psjobs.dev/role=trainer"))
    );

    // Down while no operator looks, and up again later: no incarnation is used twice.
    drop(operator);
    team.scale(2).await;
    let operator = team.operator();
    for pod in ["mnist-trainer-2", "mnist-trainer-3"] {
        team.until(pod, |pod: Option<&Pod>| pod.is_none()).await;
    }
    team.status(trainers("2/2")).await;
    assert!(team.event("ScaledDown").await.contains("trainers 2 and 3 leave, the others go on"));
    team.scale(3).await;
    team.pod("mnist-trainer-2", 1).await;
    team.run("mnist-trainer-2").await;
    team.status(trainers("3/3")).await;

    team.end("mnist-trainer-2", 3, "the disk is gone").await;
    let status = team.status(|status| status.trainer.as_ref().is_some_and(|trainer| trainer.lost == 1)).await;
    team.until("mnist-trainer-2", |pod: Option<&Pod>| pod.is_none()).await;
    assert_eq!((status.phase, status.restarts, status.restarts_counted), (Some(Phase::Running), 0, 0));
    assert!(message(&status, ConditionType::Shrunk).contains("2 of 3 trainers go on"), "{status:#?}");
    assert_eq!(status.last_failure.map(|failure| failure.log_tail).as_deref(), Some("the disk is gone"));
    drop(operator);
    let _operator = team.operator();
    assert_eq!(uids(&PODS).await, from_the_start, "no other pod was started again");

    team.end("mnist-trainer-0", 0, "").await;
    team.end("mnist-trainer-1", 0, "").await;
    team.phase(Phase::Completing).await;
    team.end("mnist-ps-0", 0, "").await;
    let done = team.phase(Phase::Succeeded).await;
    assert_eq!((done.restarts, team.pods().await), (0, PODS.map(str::to_owned).to_vec()));
}

#[tokio::test]
async fn of_two_operators_one_works_and_the_other_takes_over() {
    let team = team!("leader");
    let start = |identity| {
        team.operator_with(&["--leader-elect", "--lease-namespace", &team.namespace, "--identity", identity])
    };
    let first = start("first");
    let leads = async |who: &str| {
        let who = who.to_owned();
        let is = move |lease: Option<&k8s_openapi::api::coordination::v1::Lease>| {
            let holder = lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.clone());
            holder.as_deref() == Some(who.as_str())
        };
        team.until("psjobs-operator", is).await;
    };
    leads("first").await;
    let second = start("second");
    team.apply("").await;
    team.run_all().await;

    drop(first);
    team.delete_pod("mnist-trainer-0").await;
    leads("second").await;
    team.pod("mnist-trainer-0", 1).await;
    team.run_all_again(1).await;
    assert_eq!(team.pods().await.len(), 3);

    // One that is asked to end gives the lease back.
    let _third = start("third");
    second.terminate().await;
    leads("third").await;
}

#[tokio::test]
async fn an_upgrade_of_the_operator_does_not_touch_running_pods() {
    let team = team!("upgrade");
    let operator = team.operator();
    team.apply("").await;
    team.run_all().await;
    let uids = async || {
        let pods = team.api::<Pod>().list(&Default::default()).await.expect("pods can be listed");
        pods.iter().filter_map(|pod| pod.uid()).collect::<Vec<_>>()
    };
    let before = uids().await;
    operator.terminate().await;

    let _newer = team.operator_with(&["--worker-image", "psjobs-worker:9.9.9"]);
    // Once it reports the new generation it has decided about the job as it is.
    team.patch(json!({"failurePolicy": {"maxRestarts": 9}})).await;
    let generation = team.job().await.metadata.generation;
    let status = team.status(|status| status.observed_generation == generation).await;
    assert_eq!((status.phase, status.restarts), (Some(Phase::Running), 0));
    assert_eq!(uids().await, before);
}

#[tokio::test]
async fn a_job_that_another_controller_manages_is_left_alone() {
    let team = team!("managed");
    let mut ours = team.apply("managedBy: kueue.x-k8s.io/multikueue").await;
    let _operator = team.operator();
    ours.metadata = kube::core::ObjectMeta { name: Some("ours".into()), ..Default::default() };
    ours.spec.managed_by = None;
    team.api().create(&PostParams::default(), &ours).await.expect("the job is accepted");
    team.pod("ours-trainer-1", 0).await;
    team.until("ours", |job: Option<&ParameterServerJob>| job.is_some_and(|job| job.status.is_some())).await;
    assert_eq!(team.pods().await, ["ours-ps-0", "ours-trainer-0", "ours-trainer-1"]);
    assert_eq!(team.job().await.status, None);
}

#[tokio::test]
async fn all_pods_start_again_together_when_the_strategy_says_so() {
    let team = team!("recreate");
    let _operator = team.operator();
    team.apply("failurePolicy: {restartStrategy: RecreateAll, maxRestarts: 1}").await;
    team.run_all().await;
    team.end("mnist-trainer-1", 1, "lost the others").await;
    for pod in PODS {
        team.pod(pod, 1).await;
    }
    let status = team.run_all().await;
    assert_eq!((status.restarts, status.restarts_counted), (3, 1));
    assert!(team.event("JobRestarted").await.contains("restart 1 of 1"));
}

#[tokio::test]
async fn pods_get_certificates_of_their_own_and_new_ones_when_all_start_again() {
    let team = team!("certificates");
    let _operator = team.operator();
    team.apply("failurePolicy: {restartStrategy: RecreateAll}").await;
    let first = authority(&team, 0).await;
    team.run_all().await;
    team.end("mnist-trainer-1", 1, "lost the others").await;
    assert_ne!(authority(&team, 1).await, first);
}

/// The authority of the one Secret that all pods of an incarnation mount.
async fn authority(team: &Team, incarnation: u32) -> ByteString {
    let mut mounted = BTreeSet::new();
    for pod in PODS {
        let volumes = team.pod(pod, incarnation).await.spec.and_then(|spec| spec.volumes).expect("volumes");
        mounted.extend(volumes.into_iter().filter_map(|volume| volume.secret?.secret_name));
    }
    let name = mounted.pop_first().expect("a Secret is mounted");
    assert_eq!(mounted.len(), 0, "besides {name} also {mounted:?}");
    team.status(|status| status.certificates.as_ref() == Some(&name)).await;
    let secret = team.api::<Secret>().get(&name).await.expect("it exists");
    assert!(secret.owner_references().iter().any(|owner| owner.name == "mnist"), "it goes with the job");
    secret.data.expect("data").remove("ca.crt").expect("an authority")
}

#[tokio::test]
async fn a_backend_that_is_not_installed_is_reported_and_the_job_recovers_when_it_is() {
    // A server of its own: the others know no Volcano.
    let Some(server) = ApiServer::start().await else { return };
    install_definition(&server.client()).await;
    let team = Team::on(&server, "volcano").await;
    let _operator = team.operator();
    team.apply("schedulingPolicy: {backend: Volcano}").await;
    let refused = team.status(|status| status.reason.as_deref() == Some("Refused")).await;
    let words = message(&refused, ConditionType::Created);
    assert!(
        words.contains("no PodGroup of scheduling.volcano.sh/v1beta1") && words.contains("install Volcano"),
        "{words}"
    );
    assert_eq!(team.pods().await, [""; 0], "no pod waits for a scheduler that does not come");

    install_pod_groups(&team.client, "scheduling.volcano.sh", "v1beta1").await;
    team.run_all().await;
    let pod = team.pod("mnist-trainer-0", 0).await;
    assert_eq!(pod.annotations().get("scheduling.k8s.io/group-name").map(String::as_str), Some("mnist-0"));
    assert_eq!(pod.spec.expect("a spec").scheduler_name.as_deref(), Some("volcano"));
}

#[tokio::test]
async fn a_jobs_pods_are_admitted_where_the_restricted_standard_is_enforced() {
    let team = team!("restricted");
    let enforced = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let namespaces = kube::Api::<Namespace>::all(team.client.clone());
    let params = PatchParams::default();
    namespaces.patch(&team.namespace, &params, &Patch::Merge(enforced)).await.expect("a label can be set");
    team.until_pods_are_refused("restricted").await;

    let _operator = team.operator();
    team.apply("checkpoint: {volumeClaim: {size: 1Gi}}\nnetwork: {networkPolicy: true}").await;
    let status = team.run_all().await;
    assert_eq!((status.restarts, team.pods().await), (0, PODS.map(str::to_owned).to_vec()));
}

#[tokio::test]
async fn an_operator_waits_for_its_definition() {
    let Some(server) = ApiServer::start().await else { return };
    let team = Team::on(&server, "early").await;
    let _operator = team.operator();
    // It must have looked at least once before: what it finds then is no definition.
    let jobs = team.api::<ParameterServerJob>();
    assert!(jobs.list(&Default::default()).await.is_err());
    install_definition(&team.client).await;
    team.apply("").await;
    team.run_all().await;
}

#[tokio::test]
async fn a_status_is_written_only_on_top_of_what_was_read() {
    let team = team!("status");
    let old = team.apply("").await;
    let with = |step: i32| ParameterServerJobStatus { restarts: step, ..Default::default() };
    let stored = update_status(&team.client, &old, &with(1)).await.expect("written").expect("changed");
    assert_eq!(stored.status, Some(with(1)));
    let again = update_status(&team.client, &stored, &with(1)).await.expect("nothing to do");
    assert!(again.is_none(), "an equal status is not written");
    let late = update_status(&team.client, &old, &with(2)).await;
    assert!(matches!(late, Err(ReconcileError::OutOfDate)), "{late:?}");
    team.api::<ParameterServerJob>().delete("mnist", &DeleteParams::default()).await.expect("deleted");
    let gone = update_status(&team.client, &stored, &with(3)).await;
    assert!(matches!(gone, Ok(None)), "{gone:?}");
}

/// The kubelet says what the trainer and the server of a colocated pod do.
async fn report(team: &Team, pod: &str, phase: &str, trainer: serde_json::Value, server: serde_json::Value) {
    let status = |(name, state): (&str, serde_json::Value)| {
        let ready = state.get("running").is_some();
        json!({"name": name, "image": "i", "imageID": "i", "ready": ready, "restartCount": 0, "state": state})
    };
    let statuses = [("trainer", trainer), ("psjobs-server", server)].map(status);
    let patch = Patch::Merge(json!({"status": {"phase": phase, "containerStatuses": statuses}}));
    team.api::<Pod>().patch_status(pod, &PatchParams::default(), &patch).await.expect("a pod status");
}

#[tokio::test]
async fn a_colocated_job_has_a_pod_for_each_trainer_and_its_server() {
    let pods = ["mnist-trainer-0", "mnist-trainer-1"];
    let runs = || json!({"running": {}});
    let ended = |code: i32| {
        let finished = jiff::Timestamp::now().to_string();
        json!({"terminated": {"exitCode": code, "finishedAt": finished, "reason": "Error", "message": "no disk"}})
    };
    let team = team!("colocated");
    let _operator = team.operator();
    team.apply("ps: {placement: Colocated}").await;
    team.status(|status| status.conditions.iter().any(|c| c.type_ == ConditionType::Created && c.status == "True"))
        .await;
    assert_eq!(team.pods().await, pods);
    for pod in pods {
        report(&team, pod, "Running", runs(), runs()).await;
    }
    let running = team.phase(Phase::Running).await;
    assert_eq!(running.ps.map(|ps| ps.summary).as_deref(), Some("2/2"));

    report(&team, "mnist-trainer-1", "Running", runs(), ended(1)).await;
    team.pod("mnist-trainer-1", 1).await;
    report(&team, "mnist-trainer-1", "Running", runs(), runs()).await;
    let again = team.status(|status| status.phase == Some(Phase::Running) && status.restarts == 2).await;
    assert_eq!(again.restarts_counted, 1, "the server failed, and took its trainer along");
    let cause = again.last_failure.expect("a cause");
    assert_eq!((cause.pod.as_str(), cause.role.as_str(), cause.rank), ("mnist-trainer-1", "ps", 1));
    assert_eq!(cause.log_tail, "no disk");

    for pod in pods {
        report(&team, pod, "Running", ended(0), runs()).await;
    }
    team.phase(Phase::Completing).await;
    for pod in pods {
        report(&team, pod, "Succeeded", ended(0), ended(0)).await;
    }
    let done = team.phase(Phase::Succeeded).await;
    assert_eq!(done.trainer.map(|trainer| trainer.succeeded), Some(2));
    assert_eq!(team.pods().await, pods, "finished pods stay for their logs");
}
