//! Pods are killed in the middle of training, and the job succeeds all the same.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::DeleteParams;
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::example;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

/// Below that the model has not learnt from what came after the loss.
const ACCURACY: f64 = 0.96;

pub async fn of_a_trainer(site: &Site) -> Result<()> {
    of(site, &example()?, "mnist-trainer-1").await
}

pub async fn of_a_server(site: &Site) -> Result<()> {
    of(site, &example()?, "mnist-ps-0").await
}

/// The server that leads the job is one of two that hold every block.
pub async fn of_a_replicated_server(site: &Site) -> Result<()> {
    let mut job = example()?;
    (job.spec.ps.replicas, job.spec.ps.replication_factor) = (2, 2);
    of(site, &job, "mnist-ps-0").await
}

async fn of(site: &Site, job: &ParameterServerJob, victim: &str) -> Result<()> {
    site.apply(job).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;
    line(&site.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;

    let before = site.pods().get(victim).await?;
    // Without a grace period: it has no time to say goodbye.
    site.pods().delete(victim, &DeleteParams::default().grace_period(0)).await?;
    let another = |uid| move |pod: Option<&k8s_openapi::api::core::v1::Pod>| pod.is_some_and(|pod| pod.uid() != uid);
    let after = until(&site.pods(), victim, SHORT, "the killed pod to be replaced", another(before.uid())).await?;
    let after = after.context("the pod that took its place")?;
    let incarnation = after.annotations().get(names::ANNOTATION_INCARNATION);
    ensure!(incarnation.is_some_and(|incarnation| incarnation == "1"), "the new pod's incarnation is {incarnation:?}");

    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 1, "{} pods were replaced instead of 1", status.restarts);
    ensure!(status.restarts_counted == 0, "a deleted pod was counted as a failure");
    let metrics = status.progress.context("a job that succeeded tells its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job tells its accuracy")?.value;
    println!("    {victim} killed; accuracy {accuracy:.4} (at least {ACCURACY})");
    ensure!(accuracy >= ACCURACY, "the accuracy is {accuracy}");
    Ok(())
}
