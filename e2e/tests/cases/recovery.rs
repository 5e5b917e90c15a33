//! Pods are killed during training; they are replaced and the job succeeds.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::DeleteParams;
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED_ACCURACY, paced};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

pub async fn killed_trainer_is_replaced(namespace: &TestNamespace) -> Result<()> {
    is_replaced(namespace, &paced()?, "mnist-trainer-1").await
}

pub async fn killed_server_is_replaced(namespace: &TestNamespace) -> Result<()> {
    is_replaced(namespace, &paced()?, "mnist-ps-0").await
}

/// Kills server 0 of two servers that both hold every block.
pub async fn killed_replicated_server_is_replaced(namespace: &TestNamespace) -> Result<()> {
    let mut job = paced()?;
    (job.spec.ps.replicas, job.spec.ps.replication_factor) = (2, 2);
    is_replaced(namespace, &job, "mnist-ps-0").await
}

async fn is_replaced(namespace: &TestNamespace, job: &ParameterServerJob, victim: &str) -> Result<()> {
    namespace.apply(job).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    line(&namespace.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;

    let before = namespace.pods().get(victim).await?;
    // Without a grace period, so that the process cannot leave the job properly.
    namespace.pods().delete(victim, &DeleteParams::default().grace_period(0)).await?;
    let another = |uid| move |pod: Option<&k8s_openapi::api::core::v1::Pod>| pod.is_some_and(|pod| pod.uid() != uid);
    let after = until(&namespace.pods(), victim, SHORT, "the killed pod to be replaced", another(before.uid())).await?;
    let after = after.context("the pod that took its place")?;
    let incarnation = after.annotations().get(names::ANNOTATION_INCARNATION);
    ensure!(incarnation.is_some_and(|incarnation| incarnation == "1"), "the new pod's incarnation is {incarnation:?}");

    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 1, "{} pods were replaced instead of 1", status.restarts);
    ensure!(status.restarts_counted == 0, "a deleted pod was counted as a failure");
    let metrics = status.progress.context("a job that succeeded reports its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job shows its accuracy")?.value;
    namespace.print(format_args!("{victim} killed; accuracy {accuracy:.4} (at least {PACED_ACCURACY})"));
    ensure!(accuracy >= PACED_ACCURACY, "the accuracy is {accuracy}");
    Ok(())
}
