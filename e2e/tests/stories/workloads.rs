//! The other examples, for a few steps: what they need is in the image, and they run with few rights.

use anyhow::{Context, Result, ensure};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::TRAINING;

pub async fn mnist_remote(site: &Site) -> Result<()> {
    runs(site, "mnist-remote", &["train", "mnist-remote", "--max-steps", "100"]).await
}

pub async fn cartpole(site: &Site) -> Result<()> {
    runs(site, "cartpole", &["train", "cartpole", "--max-rounds", "5"]).await
}

pub async fn lm(site: &Site) -> Result<()> {
    runs(site, "lm", &["train", "lm", "--max-steps", "10", "--words", "2000", "--held-out", "2000"]).await
}

/// Its trainers find each other through server 0, and send their gradients round a ring of their own.
pub async fn recsys(site: &Site) -> Result<()> {
    runs(site, "recsys", &["train", "recsys", "--keys", "1000000", "--examples", "40000"]).await
}

async fn runs(site: &Site, example: &str, arguments: &[&str]) -> Result<()> {
    let text = std::fs::read_to_string(format!("examples/{example}.yaml"))?;
    let mut job: ParameterServerJob = serde_yaml::from_str(&text)?;
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    pod.containers[0].args = Some(arguments.iter().map(|&argument| argument.to_owned()).collect());
    site.apply(&job).await?;
    let status = site.phase(example, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    let progress = status.progress.context("a job that succeeded tells its progress")?;
    ensure!(progress.step > 0, "no step was told");
    Ok(())
}
