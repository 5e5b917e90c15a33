//! Deletes jobs: all that was meant goes, nothing else, and nothing comes back.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use prometheus_client::registry::Registry;
use psjobs_api::crd::ParameterServerJob;
use psjobs_operator::controller::model::Deletion;
use psjobs_operator::controller::write::delete::delete_pods;
use psjobs_operator::controller::write::writer::Writer;
use psjobs_operator::lease::Tenure;
use psjobs_operator::metrics::Metrics;
use serde_json::json;
use support::Team;

#[tokio::test]
async fn a_job_deleted_in_the_foreground_takes_all_along_and_nothing_comes_back() {
    let Some(team) = Team::new("foreground").await else { return };
    let _operator = team.operator();
    let job = team.apply("").await;
    team.run_all().await;
    let pods = team.pods().await;
    let mut owners = vec![team.api::<Service>().get("mnist").await.expect("it exists").owner_references().to_vec()];
    for pod in &pods {
        owners.push(team.pod(pod, 0).await.owner_references().to_vec());
    }
    for owner in owners {
        let blocks = owner.iter().map(|owner| (owner.uid.clone(), owner.block_owner_deletion)).collect::<Vec<_>>();
        assert_eq!(blocks, [(job.uid().expect("stored"), Some(true))], "the job waits for each child");
    }

    let jobs = team.api::<ParameterServerJob>();
    jobs.delete("mnist", &DeleteParams::foreground()).await.expect("the job can be deleted");
    // The garbage collector's work, unless it does it itself: children first, and the job after them.
    for pod in &pods {
        gone(team.api::<Pod>().delete(pod, &DeleteParams::default()).await.map(drop));
        team.until(pod, |pod: Option<&Pod>| pod.is_none()).await;
    }
    // What happened to those pods is old news to an operator that has started another job since.
    let metadata = kube::core::ObjectMeta { name: Some("later".into()), ..Default::default() };
    let later = ParameterServerJob { metadata, spec: job.spec, status: None };
    jobs.create(&PostParams::default(), &later).await.expect("the job is accepted");
    let of_later = ["later-ps-0", "later-trainer-0", "later-trainer-1"];
    for pod in of_later {
        team.pod(pod, 0).await;
    }
    assert_eq!(team.pods().await, of_later);
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    gone(jobs.patch("mnist", &PatchParams::default(), &free).await.map(drop));
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
    assert_eq!(team.pods().await.len(), 3);
}

/// It worked, or there was nothing left to do it to.
fn gone(result: kube::Result<()>) {
    match result {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        result => result.expect("the API server does it"),
    }
}

#[tokio::test]
async fn a_delete_means_one_pod_and_not_the_next_of_its_name() {
    let Some(team) = Team::new("uid").await else { return };
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let pod = team.api::<Pod>().create(&PostParams::default(), &pod).await.expect("a pod can be made");
    let writer = Writer::new(
        team.client.clone(),
        Arc::default(),
        Metrics::new(&mut Registry::default()),
        Arc::new(Tenure::unlimited()),
    );
    let deletion = |uid: &str| Deletion { name: "p".into(), uid: uid.into(), force: false };
    let delete = async |uid: &str| delete_pods(&writer, &team.namespace, &[deletion(uid)]).await.expect("no error");

    delete("0b6c1d2e-0000-0000-0000-000000000000").await;
    let still = team.api::<Pod>().get("p").await.expect("the pod of another uid stays");
    let uid = pod.uid().expect("stored");
    assert_eq!((still.uid().as_ref(), still.metadata.deletion_timestamp), (Some(&uid), None));
    delete(&uid).await;
    team.until("p", |pod: Option<&Pod>| pod.is_none()).await;
    delete(&uid).await;
}
