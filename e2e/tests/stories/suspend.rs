//! A job is taken off the cluster for a while.

use anyhow::{Context, Result, ensure};
use kube::api::{ListParams, Patch, PatchParams};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until, until_none};
use serde_json::json;

pub async fn and_resume(site: &Site) -> Result<()> {
    site.apply(&training(&["train", "mnist", "--max-steps", "300"])?).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;

    suspend(site, "mnist", true).await?;
    let status = site.phase("mnist", Phase::Suspended, SHORT).await?;
    ensure!(status.start_time.is_none(), "a suspended job is not active");
    until_none(&site.pods(), &ListParams::default(), SHORT, "the suspended job's pods to go").await?;

    suspend(site, "mnist", false).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;
    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts_counted == 0, "being suspended was counted as a failure");
    Ok(())
}

/// A job with a checkpoint goes on where it was.
pub async fn and_resume_from_a_checkpoint(site: &Site) -> Result<()> {
    const JOB: &str = "mnist-checkpoint";
    site.kubectl(&["apply", "--filename", "examples/mnist-checkpoint.yaml"]).await?;
    let told = |job: &ParameterServerJob| job.status.as_ref()?.last_checkpoint.clone();
    let kept = |job: Option<&ParameterServerJob>| job.and_then(told).is_some();
    let job = until(&site.jobs(), JOB, TRAINING, "a checkpoint in the job's status", kept).await?;
    let before = job.as_ref().and_then(told).context("it was there")?;

    suspend(site, JOB, true).await?;
    site.phase(JOB, Phase::Suspended, SHORT).await?;
    until_none(&site.pods(), &ListParams::default(), SHORT, "the suspended job's pods to go").await?;
    suspend(site, JOB, false).await?;
    site.phase(JOB, Phase::Running, SHORT).await?;
    let restored = line(&site.pods(), "mnist-checkpoint-ps-0", &["restored from a checkpoint"], SHORT).await?;
    println!("    {}", restored.text);

    let status = site.phase(JOB, Phase::Succeeded, TRAINING).await?;
    let (last, model) = (status.last_checkpoint.context("the last checkpoint")?, status.model.context("the model")?);
    ensure!(last.step > before.step, "the checkpoint of step {} is not after that of step {}", last.step, before.step);
    ensure!(model.path == "mnist-checkpoint/model.safetensors", "the model is at {}", model.path);
    let accuracy = model.metric.context("the model's metric")?;
    println!("    {} {:.4}", accuracy.name, accuracy.value);
    ensure!(accuracy.name == "accuracy" && accuracy.value > 0.96, "the model's metric is {accuracy:?}");
    Ok(())
}

async fn suspend(site: &Site, job: &str, suspend: bool) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"suspend": suspend}}));
    site.jobs().patch(job, &PatchParams::default(), &patch).await?;
    Ok(())
}
