//! The other examples, for a few steps: what they need is in the image, and they run with few rights.

use anyhow::{Context, Result, ensure};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING};

pub async fn mnist_remote(site: &Site) -> Result<()> {
    runs(site, "mnist-remote", "train mnist-remote --max-steps 100").await
}

pub async fn cartpole(site: &Site) -> Result<()> {
    runs(site, "cartpole", "train cartpole --max-rounds 5").await
}

/// The server evaluates the model meanwhile, with its own copy of the text.
pub async fn lm(site: &Site) -> Result<()> {
    const MODEL: &str = "lm --words 2000 --held-out 2000";
    let serve = format!("serve evaluate {MODEL} --every 1");
    start(site, "lm", Some(&serve), &format!("train {MODEL} --max-steps 40")).await?;
    site.phase("lm", Phase::Running, SHORT).await?;
    line(&site.pods(), "lm-ps-0", &["evaluated", "perplexity="], TRAINING).await?;
    succeeds(site, "lm").await
}

/// Its trainers find each other through server 0, and send their gradients round a ring of their own.
pub async fn recsys(site: &Site) -> Result<()> {
    runs(site, "recsys", "train recsys --keys 1000000 --examples 40000").await
}

async fn runs(site: &Site, example: &str, train: &str) -> Result<()> {
    start(site, example, None, train).await?;
    succeeds(site, example).await
}

/// Applies the example with other arguments.
async fn start(site: &Site, example: &str, serve: Option<&str>, train: &str) -> Result<()> {
    let text = std::fs::read_to_string(format!("examples/{example}.yaml"))?;
    let mut job: ParameterServerJob = serde_yaml::from_str(&text)?;
    let words = |line: &str| Some(line.split_whitespace().map(str::to_owned).collect());
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    pod.containers[0].args = words(train);
    if let Some(serve) = serve {
        let template = job.spec.ps.template.as_mut().context("the example has a template of servers")?;
        template.spec.as_mut().context("it has a spec")?.containers[0].args = words(serve);
    }
    site.apply(&job).await?;
    Ok(())
}

async fn succeeds(site: &Site, example: &str) -> Result<()> {
    let status = site.phase(example, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    let progress = status.progress.context("a job that succeeded tells its progress")?;
    ensure!(progress.step > 0, "no step was told");
    Ok(())
}
