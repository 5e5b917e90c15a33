//! A job with a server in the pod of each trainer: they share memory, and a pod that is lost costs both.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED, PACED_ACCURACY, from_file, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

const JOB: &str = "mnist-colocated";
const VICTIM: &str = "mnist-colocated-trainer-1";

/// Kills one of two pods after a checkpoint. Its successor has a server and a trainer, and the job ends with the whole model.
pub async fn lost_pod_is_replaced(namespace: &TestNamespace) -> Result<()> {
    let mut job = from_file("examples/mnist-colocated.yaml")?;
    main_container(&mut job)?.args = Some(PACED.map(str::to_owned).to_vec());
    namespace.apply(&job).await?;
    let status = namespace.phase(JOB, Phase::Running, SHORT).await?;
    let summary = |of_role: Option<psjobs_api::crd::RoleStatus>| of_role.map(|of_role| of_role.summary);
    ensure!(summary(status.ps.clone()).as_deref() == Some("2/2"), "the servers are {:?}", summary(status.ps));
    let pods = namespace.pods_of(JOB, Role::Trainer).await?;
    ensure!(pods.len() == 2, "{} pods instead of 2", pods.len());
    for (index, pod) in pods.iter().enumerate() {
        let servers = format!("servers=[{index}]");
        line(&namespace.pods(), &pod.name_any(), &["shares memory", &servers], TRAINING).await?;
    }

    let kept = |job: Option<&ParameterServerJob>| job.is_some_and(|job| last_checkpoint(job).is_some());
    until(&namespace.jobs(), JOB, TRAINING, "a checkpoint in the job's status", kept).await?;
    let before = namespace.pods().get(VICTIM).await?;
    // Without a grace period, so that the processes cannot leave the job properly.
    namespace.pods().delete(VICTIM, &DeleteParams::default().grace_period(0)).await?;
    let another = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.uid() != before.uid());
    let after = until(&namespace.pods(), VICTIM, SHORT, "the killed pod to be replaced", another).await?;
    let after = after.context("the pod that took its place")?;
    let incarnation = after.annotations().get(names::ANNOTATION_INCARNATION);
    ensure!(incarnation.is_some_and(|incarnation| incarnation == "1"), "the new pod's incarnation is {incarnation:?}");

    let status = namespace.phase(JOB, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 2, "{} processes were replaced instead of a server and a trainer", status.restarts);
    ensure!(status.restarts_counted == 0, "a deleted pod was counted as a failure");
    let said = namespace.psjob(&["logs", JOB, "--role", "ps", "--index", "1"]).await?;
    ensure!(said.contains("restored from a checkpoint"), "server 1 did not restore a checkpoint: {said}");
    let metrics = status.progress.context("a job that succeeded reports its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job shows its accuracy")?.value;
    namespace.print(format_args!("{VICTIM} killed; accuracy {accuracy:.4} (at least {PACED_ACCURACY})"));
    ensure!(accuracy >= PACED_ACCURACY, "the accuracy is {accuracy}");
    Ok(())
}

fn last_checkpoint(job: &ParameterServerJob) -> Option<i64> {
    Some(job.status.as_ref()?.last_checkpoint.as_ref()?.step)
}
