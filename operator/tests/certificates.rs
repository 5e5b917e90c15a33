//! Secrets with a job's certificates: none that somebody else has made is taken, and those of earlier pods are deleted.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt as _;
use kube::api::{ListParams, PostParams};
use psjobs_api::crd::{Phase, names};
use serde_json::json;
use support::Team;

/// The Secret that a pod mounts.
fn mounted(pod: &Pod) -> Option<String> {
    let volumes = pod.spec.as_ref()?.volumes.as_ref()?;
    volumes.iter().find_map(|volume| volume.secret.as_ref()?.secret_name.clone())
}

async fn secrets(team: &Team) -> Vec<String> {
    let secrets = team.api::<Secret>().list(&ListParams::default()).await.expect("Secrets can be listed");
    secrets.iter().map(|secret| secret.name_any()).collect()
}

#[tokio::test]
async fn a_secret_that_another_has_made_is_named_and_not_taken_and_old_ones_are_deleted() {
    let Some(team) = Team::new("secrets").await else { return };
    let job = team.apply("suspend: true").await;
    let uid = job.uid().expect("stored");
    let (first, second) = (names::certificates("mnist", &uid, 0), names::certificates("mnist", &uid, 1));
    for name in [&first, "theirs"] {
        let secret = json!({"metadata": {"name": name}, "stringData": {"ca.crt": "of somebody who listens"}});
        let secret: Secret = serde_json::from_value(secret).expect("a Secret");
        team.api().create(&PostParams::default(), &secret).await.expect("a Secret can be made");
    }
    let _operator = team.operator();
    team.phase(Phase::Suspended).await;
    team.patch(json!({"suspend": false})).await;
    let event = team.event("Refused").await;
    assert!(event.contains(&format!("secret {first}")) && event.contains("is tried next"), "{event}");
    team.run_all().await;
    let pods = ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"];
    let mut used = Vec::new();
    for pod in pods {
        used.extend(mounted(&team.pod(pod, 0).await));
    }
    used.dedup();
    assert_eq!(used.len(), 1, "all pods have the same certificates: {used:?}");
    assert!(used[0].starts_with(&format!("{first}-")), "{used:?}");
    let secret = team.api::<Secret>().get(&used[0]).await.expect("it exists");
    assert_eq!(secret.owner_references()[0].uid, uid);
    assert_eq!(team.job().await.status.and_then(|status| status.certificates).as_ref(), Some(&used[0]));

    team.patch(json!({"suspend": true})).await;
    team.phase(Phase::Suspended).await;
    for pod in pods {
        team.until::<Pod>(pod, |pod| pod.is_none()).await;
    }
    team.patch(json!({"suspend": false})).await;
    assert_eq!(mounted(&team.pod("mnist-ps-0", 1).await).as_ref(), Some(&second));
    assert_eq!(secrets(&team).await, [first, second, "theirs".to_owned()], "those of others stay, our old one is gone");
}
